"""The examples of a run: which ones each step gets, and from where."""

import functools
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from sam_optax.experiments.data.dataset import Dataset
from sam_optax.experiments.networks.small import CNN, MLP
from sam_optax.experiments.training.devices import Devices
from sam_optax.experiments.training.task import Task, initial_variables, noisy_labels
from sam_optax.experiments.types import PyTree

SMALL = 2**24
"""Maximum number of params of all seeds that an accelerator trains together."""


class Source:
    """The examples for the steps of all methods, on the devices (``resident``) or on disk.

    The seeds of one of the ``groups`` are trained by the same call of a program. ``looped``: this
    call runs many steps.
    """

    def __init__(self, task: Task, place: Devices) -> None:
        self.task, self.place = task, place
        self.resident = isinstance(task.dataset.train.x, np.ndarray)
        # Inside a loop, XLA for CPUs uses fewer threads: convolutions take up to 16 times as long.
        # Small networks gain more from one call for an epoch of all seeds.
        on_cpu, small = jax.default_backend() == "cpu", isinstance(task.model, MLP | CNN)
        self.looped = self.resident and (small or not on_cpu)
        together = self.looped and (on_cpu or _size(task) <= SMALL)
        self.groups = [task.seeds] if together else [(seed,) for seed in task.seeds]
        self._labels = [noisy_labels(task, seeds) for seeds in self.groups]
        if self.resident:
            self._x, self._labels = place.put((task.dataset.train.x, self._labels))

    def epoch(self, group: int, batch_size: int, epoch: int) -> tuple[Iterator[PyTree], PyTree]:
        """The input of each call of a step, and labels and indices for each seed of the group.

        The input is all examples again, with labels (seeds, examples) and indices (seeds, steps,
        batch_size); from disk, a batch with its labels, and nothing for each seed.
        """
        seeds, dataset = self.groups[group], self.task.dataset
        if self.resident:
            orders = [order(len(dataset.train.y), batch_size, s, epoch) for s in seeds]
            indices = self.place.put(np.stack(orders), 2)
            return itertools.repeat(self._x), (self._labels[group], indices)
        rows, labels = self.place.rows(batch_size), self._labels[group][0]
        batches = train_batches(dataset, batch_size, seeds[0], epoch, rows)
        return (self.place.put_rows((x, labels[index])) for x, index in batches), (None, None)


def _size(task: Task) -> int:
    """The number of values of the variables of all seeds."""
    shapes = jax.tree.leaves(jax.eval_shape(functools.partial(initial_variables, task), 0))
    return sum(leaf.size for leaf in shapes) * len(task.seeds)


def order(examples: int, batch_size: int, seed: int, epoch: int) -> np.ndarray:
    """Indices of the examples per step of an epoch, int32, (steps, batch_size); drops the rest.

    The order is the same for examples in memory and on disk.
    """
    steps = examples // batch_size
    found = np.random.default_rng([seed, 1, epoch]).permutation(examples).astype(np.int32)
    return found[: steps * batch_size].reshape(steps, batch_size)


def train_batches(
    dataset: Dataset, batch_size: int, seed: int, epoch: int, rows: slice
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields an epoch of this process's ``rows`` of each batch, with random crops.

    Images are uint8, (rows, size, size, 3), with their indices, int32, (rows,). Crops depend on
    seed and epoch.
    """
    index = order(len(dataset.train.y), batch_size, seed, epoch)[:, rows]

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
