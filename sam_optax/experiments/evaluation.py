"""Full-batch measures of trained params: loss, accuracy and sharpness."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import sam_optax

_BLOCK = 500
"""Examples that are evaluated at once, which bounds the memory of a full batch."""


class Blocks(NamedTuple):
    """A set of examples in blocks of equal size, the last one filled up.

    Attributes:
      x: float32, (blocks, size, …).
      y: int32 labels, (blocks, size), or (seeds, blocks, size).
      weight: float32, (blocks, size): 1 for an example, 0 for filling.
    """

    x: Any
    y: Any
    weight: Any


def blocks(x: np.ndarray, y: np.ndarray) -> Blocks:
    """Arranges examples (n, …) and labels (n,) or (seeds, n)."""
    n = len(x)
    count = -(-n // _BLOCK)
    size = -(-n // count)
    index = np.arange(count * size)
    weight = (index < n).astype(np.float32).reshape(count, size)
    index = np.minimum(index, n - 1)
    return Blocks(
        x[index].reshape(count, size, *x.shape[1:]),
        y[..., index].reshape(*y.shape[:-1], count, size),
        weight,
    )


def total(f: Any, data: Blocks) -> Any:
    """The sum over blocks of ``f(block)``."""
    shapes = jax.eval_shape(f, jax.tree.map(lambda leaf: leaf[0], data))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return jax.lax.scan(
        lambda acc, block: (jax.tree.map(jnp.add, acc, f(block)), None), zeros, data
    )[0]


def batch_loss(model: nn.Module, params: Any, x: Any, y: Any, weight: Any = 1.0) -> jax.Array:
    """The weighted sum of the examples' cross entropies, in nats."""
    return jnp.sum(weight * losses(model, params, x, y))


def losses(model: nn.Module, params: Any, x: Any, y: Any) -> jax.Array:
    """The examples' cross entropies, in nats."""
    logits = model.apply(params, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def evaluate(model: nn.Module, params: Any, train: Blocks, test: Blocks) -> dict[str, jax.Array]:
    """Mean training loss in nats, on the labels trained on, and test accuracy in [0, 1]."""
    loss = total(lambda b: batch_loss(model, params, *b), train)
    correct = total(
        lambda b: jnp.sum(
            b.weight * (jnp.argmax(jnp.asarray(model.apply(params, b.x)), -1) == b.y)
        ),
        test,
    )
    return {
        "train_loss": loss / jnp.sum(train.weight),
        "test_accuracy": correct / jnp.sum(test.weight),
    }


def sharpness(model: nn.Module, params: Any, data: Blocks, rho: float) -> jax.Array:
    """L(w + ε) − L(w) over all examples, ε being SAM's for the full gradient, in nats.

    One gradient step of length ρ: a lower bound of the worst rise within ρ, and blind at a point
    where the gradient is zero.
    """
    n = jnp.sum(data.weight)

    def loss_at(params: Any) -> jax.Array:
        return total(lambda b: batch_loss(model, params, *b), data) / n

    loss, grads = total(
        lambda b: jax.value_and_grad(lambda p: batch_loss(model, p, *b))(params), data
    )
    sam = sam_optax.sam(rho)
    perturbed, _ = sam.perturb_fn(params, grads, sam.init(params))
    return loss_at(perturbed) - loss / n
