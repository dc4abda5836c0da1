"""What is measured of trained networks: loss, accuracy and sharpness over many examples."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sam_optax.experiments.data.dataset import Dataset, Examples
from sam_optax.experiments.networks import augmentation
from sam_optax.experiments.training.task import Task

BLOCK = 500
"""Examples that are evaluated at once, which bounds the memory."""
MEASURED = 10_000
"""Training examples that loss and sharpness are measured on, at most."""
_MEMORY = 2**28
"""Bytes of them, at most, where the examples stay on disk."""


class Blocks(NamedTuple):
    """A set of examples in blocks of equal size, the last one filled up.

    Attributes:
      x: (blocks, size, …).
      y: int32 labels, (blocks, size), or (seeds, blocks, size).
      weight: float32, (blocks, size): 1 for an example, 0 for filling.
    """

    x: Any
    y: Any
    weight: Any


def blocks(x: np.ndarray, y: np.ndarray, devices: int = 1) -> Blocks:
    """Arranges examples (n, …) and labels (n,) or (seeds, n); devices share each block."""
    n = len(x)
    count = -(-n // BLOCK)
    size = -(-n // (count * devices)) * devices
    index = np.arange(count * size)
    weight = (index < n).astype(np.float32).reshape(count, size)
    index = np.minimum(index, n - 1)
    return Blocks(
        x[index].reshape(count, size, *x.shape[1:]),
        y[..., index].reshape(*y.shape[:-1], count, size),
        weight,
    )


def measured(train: Examples) -> tuple[np.ndarray, np.ndarray]:
    """The training examples that are measured, (n, …), and their places in the training set.

    All of them up to ``MEASURED``, else a draw that is the same in every run.
    """
    count, x = min(len(train.y), MEASURED), train.x
    if not isinstance(x, np.ndarray):
        count = min(count, max(1, _MEMORY // (3 * x.size**2)))
    index = np.arange(len(train.y))
    if count < len(index):
        index = np.sort(np.random.default_rng(0).permutation(len(index))[:count])
    if isinstance(x, np.ndarray):
        return (x if count == len(x) else x[index]), index
    return np.stack([x.image(int(i), None) for i in index]), index


def variables(params: Any, batch_stats: Any) -> dict[str, Any]:
    """What a network is applied with."""
    return {"params": params, **({"batch_stats": batch_stats} if batch_stats else {})}


def ready(dataset: Dataset, x: jax.Array) -> jax.Array:
    """Examples as the network takes them: uint8 images are normalized by channel."""
    if x.dtype != jnp.uint8 or dataset.mean is None or dataset.std is None:
        return x
    return augmentation.normalize(x, dataset.mean, dataset.std)


def losses(
    task: Task, variables: Any, batch: tuple[Any, Any], train: bool = False
) -> tuple[jax.Array, Any]:
    """Cross entropies in nats, and BatchNorm's statistics after the pass.

    Args:
      task: for network and data.
      variables: ``params``, and ``batch_stats`` if there is BatchNorm.
      batch: examples, and labels (n,) or distributions of labels (n, classes).
      train: whether examples are normalized by the statistics of the batch.
    """
    x, y = batch
    logits, new = _logits(task, variables, x, train)
    if y.ndim == 1:
        found = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    else:
        found = optax.softmax_cross_entropy(logits, y)
    return found, new.get("batch_stats", {})


def _logits(task: Task, variables: Any, x: jax.Array, train: bool = False) -> tuple[Any, Any]:
    x = ready(task.dataset, x)
    if train and "batch_stats" in variables:
        logits, new = task.model.apply(variables, x, train=True, mutable=["batch_stats"])
    else:
        logits, new = task.model.apply(variables, x, train=train), {}
    return jnp.asarray(logits, jnp.promote_types(logits.dtype, jnp.float32)), new


def example_losses(task: Task) -> Callable[[Any, tuple[Any, Any]], jax.Array]:
    """``(variables, (x, y)) -> losses`` of a trained network, in evaluation mode."""
    return lambda variables, batch: losses(task, variables, batch)[0]


def total_loss(task: Task, variables: Any, block: Blocks) -> jax.Array:
    """The weighted sum of the cross entropies of a block, in nats."""
    return jnp.sum(block.weight * losses(task, variables, (block.x, block.y))[0])


def correct(task: Task, variables: Any, block: Blocks) -> jax.Array:
    """The number of examples of a block that are classified correctly."""
    logits, _ = _logits(task, variables, block.x)
    return jnp.sum(block.weight * (jnp.argmax(logits, -1) == block.y))
