"""Measures of networks: loss, scores and sharpness, and on which examples."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sam_optax
from sam_optax.experiments.data.dataset import Dataset, Examples
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.named import reported
from sam_optax.experiments.networks import augmentation
from sam_optax.experiments.training.devices import Source, over_seeds
from sam_optax.experiments.training.task import PerExample, Task, noisy_labels
from sam_optax.experiments.types import Function, PyTree, Record

BLOCK = 500
"""Number of examples evaluated at once, to bound memory."""
MEASURED = 10_000
"""Maximum number of training examples for measuring loss and sharpness."""


class Block(NamedTuple):
    """Examples that are evaluated at once; others, of weight 0, fill the last block of a set."""

    x: jax.Array  # (size, …)
    y: jax.Array  # (size, …), or (seeds, size, …)
    weight: jax.Array  # float32, (size,)


def measured(count: int) -> np.ndarray:
    """Indices of the examples to measure, among ``count``.

    All of them up to ``MEASURED``, else a random subset that is the same in every run.
    """
    if count <= MEASURED:
        return np.arange(count)
    return np.sort(np.random.default_rng(0).permutation(count)[:MEASURED])


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
        return _one_each("loss", task.loss, outputs, y), rest
    if y.ndim < outputs.ndim:
        return optax.softmax_cross_entropy_with_integer_labels(outputs, y), rest
    return optax.softmax_cross_entropy(outputs, y), rest


def _one_each(name: str, of: PerExample, outputs: jax.Array, y: jax.Array) -> jax.Array:
    """What a function of the user's gives for each example."""
    with reported(f"{name}:"):
        values, n = of(outputs, y), len(y)
    if jnp.shape(values) != (n,) or jnp.iscomplexobj(values):
        raise UserError(
            f"{name}: returns shape {jnp.shape(values)} for {n} examples; let it return one real "
            f"number for each, ({n},), such as jnp.mean((outputs - y) ** 2, axis=-1)."
        )
    if outputs.shape == (n, 1) and y.shape == (n,) and _takes_more(of, outputs, y):
        raise UserError(
            f"{name}: takes {n} outputs (n, 1) and {n + 1} labels (n,), so it does not pair them; "
            "give y of shape (n, 1), or use outputs[:, 0]."
        )
    return values


def _takes_more(of: PerExample, outputs: jax.Array, y: jax.Array) -> bool:
    """Whether it takes more labels than outputs: then it broadcasts them against each other."""
    more = jax.ShapeDtypeStruct((len(y) + 1,), y.dtype)
    try:
        return bool(jax.eval_shape(of, outputs, more).shape == (len(outputs),))
    except Exception:  # whatever a loss of pairs raises
        return False


def _outputs(
    task: Task, variables: PyTree, x: jax.Array, key: jax.Array | None = None
) -> tuple[jax.Array, PyTree]:
    x, rest = ready(task.dataset, x), [name for name in variables if name != "params"]
    how: Record = {"train": False}
    if key is not None:
        # Linen's other streams are those of params, where there is none of their name.
        how = {"train": True, "mutable": rest, "rngs": {"params": key, "dropout": key}}
    with reported("--model: the network"):
        found = task.model.apply(variables, x, **how)
    outputs, new = (found, {}) if key is None else found
    return jnp.asarray(outputs, jnp.promote_types(outputs.dtype, jnp.float32)), new


def total_loss(
    task: Task, variables: PyTree, block: Block, key: jax.Array | None = None
) -> jax.Array:
    """The weighted sum of the losses of a block; with a ``key`` as in training."""
    return jnp.sum(block.weight * losses(task, variables, (block.x, block.y), key)[0])


def total_score(task: Task, variables: PyTree, block: Block) -> jax.Array:
    """The weighted sum of a block's scores: by the task's metric, or of correct predictions."""
    outputs, _ = _outputs(task, variables, block.x)
    if task.metric.of is None:
        return jnp.sum(block.weight * (jnp.argmax(outputs, -1) == block.y))
    return jnp.sum(block.weight * _one_each("metric", task.metric.of, outputs, block.y))


class Evaluation:
    """Measures networks, given the variables of each group of seeds, block by block.

    Its programs are compiled once for all methods.
    """

    def __init__(self, source: Source) -> None:
        self._source, task = source, source.task
        train, test = task.dataset.train, task.dataset.test
        chosen, every = measured(len(train.y)), np.arange(len(test.y))
        self._train = self._placed(train, chosen, held_out=False)
        self._test = self._placed(test, every, held_out=True)
        self._sizes = np.float32(len(chosen)), np.float32(len(every))
        sam = sam_optax.sam(task.sharpness_rho)

        def gradient(task: Task, variables: PyTree, block: Block) -> PyTree:
            def loss(params: optax.Params) -> jax.Array:
                return total_loss(task, {**variables, "params": params}, block)

            return jax.value_and_grad(loss)(variables["params"])

        def perturbed(variables: PyTree, grads: optax.Updates) -> PyTree:
            params = variables["params"]
            moved, _ = sam.perturb_fn(params, grads, sam.init(params))
            return {**variables, "params": moved}

        self._loss, self._score = self._program(total_loss), self._program(total_score)
        self._gradient = self._program(gradient)
        self._perturbed = jax.jit(over_seeds(perturbed, source.count))
        self._add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b))

    def after_epoch(self, variables: Sequence[PyTree]) -> dict[str, np.ndarray]:
        """Mean training loss and mean score of the test examples, (seeds,) each."""
        found = []
        for group, of in enumerate(variables):
            loss = self._total(self._loss, of, self._train[group])
            score = self._total(self._score, of, self._test[group])
            found.append(jax.device_get((loss, score)))
        losses, scores = map(np.concatenate, zip(*found, strict=True))
        trained, tested = self._sizes
        return {"train_loss": losses / trained, self._source.task.metric.key: scores / tested}

    def sharpness(self, variables: Sequence[PyTree]) -> np.ndarray:
        """L(w + ε) − L(w) in nats, (seeds,), with SAM's ε for the full gradient.

        One gradient step of length ρ gives a lower bound of the largest rise within ρ. It sees
        nothing at a point where the gradient is zero.
        """
        found, n = [], self._sizes[0]
        for of, blocks in zip(variables, self._train, strict=True):
            loss, grads = self._total(self._gradient, of, blocks)
            above = self._total(self._loss, self._perturbed(of, grads), blocks)
            loss, above = jax.device_get((loss, above))
            found.append(above / n - loss / n)
        return np.concatenate(found)

    def _placed(self, part: Examples, chosen: np.ndarray, held_out: bool) -> list[list[Block]]:
        """Blocks of the chosen examples for each group of seeds; the devices share each block."""
        put, devices, n = self._source.put, self._source.mesh.size, len(chosen)
        count = -(-n // BLOCK)
        size = -(-n // (count * devices)) * devices
        index = np.arange(count * size).reshape(count, size)
        weight, index = (index < n).astype(np.float32), chosen[np.minimum(index, n - 1)]
        shared = [(i, put(part.x[i], 0), put(w, 0)) for i, w in zip(index, weight, strict=True)]
        task, groups = self._source.task, self._source.groups
        labels = [noisy_labels(task, seeds, held_out) for seeds in groups]
        return [[Block(x, put(y[:, i], 1), w) for i, x, w in shared] for y in labels]

    def _program(self, f: Function) -> Function:
        """``f(task, variables, block)`` of all seeds of a group, each with its own labels."""
        task, count = self._source.task, self._source.count

        def of_block(variables: PyTree, block: Block) -> PyTree:
            one = over_seeds(lambda v, y: f(task, v, block._replace(y=y)), count)
            return one(variables, block.y)

        return jax.jit(of_block)

    def _total(self, f: Function, variables: PyTree, blocks: Sequence[Block]) -> PyTree:
        return functools.reduce(self._add, (f(variables, block) for block in blocks))
