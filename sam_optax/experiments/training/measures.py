"""Measures of a network: its losses and scores, and on how many examples."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sam_optax.experiments.data.dataset import Dataset, Examples
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.networks import augmentation
from sam_optax.experiments.training.task import Task
from sam_optax.experiments.types import PyTree

BLOCK = 500
"""Number of examples evaluated at once, to bound memory."""
MEASURED = 10_000
"""Maximum number of training examples for measuring loss and sharpness."""
_MEMORY = 2**28
"""Maximum number of bytes of these, if the examples stay on disk."""


class Blocks(NamedTuple):
    """Examples in blocks of equal size, the last one padded with examples of weight 0."""

    x: jax.Array  # (blocks, size, …)
    y: jax.Array  # int32, (blocks, size) or (seeds, blocks, size)
    weight: jax.Array  # float32, (blocks, size)


def in_blocks(n: int, devices: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Indices and weights of the n examples in each block; devices share each block."""
    count = -(-n // BLOCK)
    size = -(-n // (count * devices)) * devices
    index = np.arange(count * size).reshape(count, size)
    return np.minimum(index, n - 1), (index < n).astype(np.float32)


def measured(examples: Examples) -> tuple[np.ndarray, np.ndarray]:
    """The measured examples of a set, (n, …), and their indices in it.

    All of them up to ``MEASURED``, else a random subset that is the same in every run.
    """
    count, x = min(len(examples.y), MEASURED), examples.x
    if not isinstance(x, np.ndarray):
        count = min(count, max(1, _MEMORY // (3 * x.size**2)))
    index = np.arange(len(examples.y))
    if count < len(index):
        index = np.sort(np.random.default_rng(0).permutation(len(index))[:count])
    if isinstance(x, np.ndarray):
        return (x if count == len(x) else x[index]), index
    return np.stack([x.image(int(i), None) for i in index]), index


def ready(dataset: Dataset, x: jax.Array) -> jax.Array:
    """Examples as the network takes them: uint8 images are normalized per channel."""
    if x.dtype != jnp.uint8 or dataset.mean is None or dataset.std is None:
        return x
    return augmentation.normalize(x, dataset.mean, dataset.std)


def losses(
    task: Task, variables: PyTree, batch: tuple[jax.Array, jax.Array], key: jax.Array | None = None
) -> tuple[jax.Array, PyTree]:
    """The loss of each example, (n,), and the variables that are no params after the pass.

    It is the task's, or cross entropy in nats of labels (n,) or distributions (n, classes). With a
    ``key``, BatchNorm normalizes by the statistics of the batch, and dropout draws from the key.
    """
    x, y = batch
    outputs, rest = _outputs(task, variables, x, key)
    if task.loss is not None:
        return _one_each("loss", task.loss(outputs, y), len(y)), rest
    if y.ndim < outputs.ndim:
        return optax.softmax_cross_entropy_with_integer_labels(outputs, y), rest
    return optax.softmax_cross_entropy(outputs, y), rest


def _one_each(name: str, values: jax.Array, n: int) -> jax.Array:
    if jnp.shape(values) != (n,):
        raise UserError(
            f"{name}: returns shape {jnp.shape(values)} for {n} examples; let it return one number "
            f"for each, ({n},), such as jnp.mean((outputs - y) ** 2, axis=-1)."
        )
    return values


def _outputs(
    task: Task, variables: PyTree, x: jax.Array, key: jax.Array | None = None
) -> tuple[jax.Array, PyTree]:
    x, rest = ready(task.dataset, x), [name for name in variables if name != "params"]
    if key is None:
        outputs, new = task.model.apply(variables, x, train=False), {}
    else:
        # Linen's other streams are those of params, where there is none of their name.
        streams = {"params": key, "dropout": key}
        outputs, new = task.model.apply(variables, x, train=True, mutable=rest, rngs=streams)
    return jnp.asarray(outputs, jnp.promote_types(outputs.dtype, jnp.float32)), new


def total_loss(
    task: Task, variables: PyTree, block: Blocks, key: jax.Array | None = None
) -> jax.Array:
    """The weighted sum of the losses of a block; with a ``key`` as in training."""
    return jnp.sum(block.weight * losses(task, variables, (block.x, block.y), key)[0])


def total_score(task: Task, variables: PyTree, block: Blocks) -> jax.Array:
    """The weighted sum of a block's scores: by the task's metric, or of correct predictions."""
    outputs, _ = _outputs(task, variables, block.x)
    if task.metric.of is None:
        return jnp.sum(block.weight * (jnp.argmax(outputs, -1) == block.y))
    found = _one_each("metric", task.metric.of(outputs, block.y), len(block.y))
    return jnp.sum(block.weight * found)
