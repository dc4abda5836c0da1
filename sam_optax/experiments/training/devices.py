"""The devices of a run, and the examples that each step gets there."""

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sam_optax.experiments.data.dataset import Dataset
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.networks.builtin import CNN, MLP
from sam_optax.experiments.training.task import Task, noisy_labels, shapes
from sam_optax.experiments.types import Function, PyTree

SMALL = 2**24
"""Maximum number of params of all seeds that an accelerator trains together."""


def choose(count: int | None) -> Mesh:
    """The first ``count`` devices, or all, as a mesh with one axis, ``"batch"``."""
    devices = jax.devices()
    if count is not None and count > len(devices):
        raise UserError(f"--devices {count}: there are {len(devices)}; use at most as many.")
    return Mesh(np.array(devices[:count]), ("batch",))


def over_seeds(f: Function, count: int) -> Function:
    """``f`` for ``count`` seeds, with a leading axis on every argument.

    Accelerators are faster with batched seeds. On a CPU, batched matrix products gain nothing, and
    batched convolutions are two to four times as slow, so the seeds run sequentially there.
    """
    if count == 1:
        return lambda *args: jax.tree.map(
            lambda leaf: leaf[None], f(*jax.tree.map(lambda leaf: leaf[0], args))
        )
    if jax.default_backend() == "cpu":
        return lambda *args: jax.lax.map(lambda one: f(*one), args)
    return jax.vmap(f)


class Source:
    """The examples for the steps of all methods, on the devices or, if not ``resident``, on disk.

    One call of a program runs many steps of all seeds, ``together``, or else one step of one seed:
    each of the ``groups`` has ``count`` seeds.
    """

    def __init__(self, task: Task, mesh: Mesh) -> None:
        self.task, self.mesh = task, mesh
        self.resident = isinstance(task.dataset.train.x, np.ndarray)
        # Inside a loop, XLA for CPUs uses fewer threads: convolutions take up to 16 times as long.
        # Small networks gain more from one call for an epoch of all seeds.
        small = isinstance(task.model, MLP | CNN)
        if jax.default_backend() != "cpu":
            small = sum(leaf.size for leaf in shapes(task).values()) * len(task.seeds) <= SMALL
        self.together = self.resident and small
        self.groups = [task.seeds] if self.together else [(seed,) for seed in task.seeds]
        self.count = len(self.groups[0])
        self._labels = [noisy_labels(task, seeds) for seeds in self.groups]
        if self.resident:
            self._x, self._labels = self.put((task.dataset.train.x, self._labels))

    def put(self, tree: PyTree, axis: int | None = None) -> PyTree:
        """Places arrays on the devices, which share an axis of them, or have each the whole."""
        spec = () if axis is None else (*[None] * axis, "batch")
        return jax.device_put(tree, NamedSharding(self.mesh, PartitionSpec(*spec)))

    def jit(self, f: Function, **options: Any) -> Any:
        """``f``, compiled, with results that each of the devices has."""
        return jax.jit(f, out_shardings=NamedSharding(self.mesh, PartitionSpec()), **options)

    def epoch(self, group: int, batch_size: int, epoch: int) -> tuple[Iterator[PyTree], PyTree]:
        """The input of each call of a step, and labels and indices for each seed of the group.

        The input is all examples again, with labels (seeds, examples) and indices (seeds, steps,
        batch_size); from disk, a batch with its labels, and nothing for each seed.
        """
        seeds, dataset, labels = self.groups[group], self.task.dataset, self._labels[group]
        if self.resident:
            orders = [order(len(dataset.train.y), batch_size, s, epoch) for s in seeds]
            return itertools.repeat(self._x), (labels, self.put(np.stack(orders), 2))
        batches = train_batches(dataset, batch_size, seeds[0], epoch)
        return (self.put((x, labels[0, index]), 0) for x, index in batches), (None, None)


def order(examples: int, batch_size: int, seed: int, epoch: int) -> np.ndarray:
    """Indices of the examples per step of an epoch, int32, (steps, batch_size); drops the rest.

    The order is the same for examples in memory and on disk.
    """
    steps = examples // batch_size
    found = np.random.default_rng([seed, 1, epoch]).permutation(examples).astype(np.int32)
    return found[: steps * batch_size].reshape(steps, batch_size)


def train_batches(
    dataset: Dataset, batch_size: int, seed: int, epoch: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields an epoch of random crops and their indices; the crops depend on seed and epoch.

    Images are uint8, (batch_size, size, size, 3), indices int32, (batch_size,).
    """
    index = order(len(dataset.train.y), batch_size, seed, epoch)

    def random(i: int) -> np.random.Generator:
        return np.random.default_rng([seed, 3, epoch, i])

    return zip(images(dataset.train.x, index, random), index, strict=True)


def images(
    source: Any, index: np.ndarray, random: Callable[[int], Any] = lambda i: None
) -> Iterator[np.ndarray]:
    """Yields the images of each row of indices, decoded while the devices compute."""
    import grain

    options = grain.ReadOptions(
        num_threads=os.cpu_count() or 1, prefetch_buffer_size=2 * index.shape[1]
    )
    order = grain.MapDataset.source(index.ravel())
    each = order.map(lambda i: source.image(int(i), random(int(i)))).to_iter_dataset(options)
    return iter(each.batch(index.shape[1], drop_remainder=True))
