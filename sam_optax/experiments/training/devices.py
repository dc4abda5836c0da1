"""The devices of a run, and the examples there."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

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
    """The examples for the steps of all methods, each of them on all devices.

    One call of a program runs many steps of all seeds, ``together``, or else one step of one seed:
    each of the ``groups`` has ``count`` seeds.
    """

    def __init__(self, task: Task, mesh: Mesh) -> None:
        self.task, self.mesh = task, mesh
        # Inside a loop, XLA for CPUs uses fewer threads: convolutions take up to 16 times as long.
        # Small networks gain more from one call for an epoch of all seeds.
        self.together = isinstance(task.model, MLP | CNN)
        if jax.default_backend() != "cpu":
            size = sum(leaf.size for leaf in shapes(task).values())
            self.together = size * len(task.seeds) <= SMALL
        self.groups = [task.seeds] if self.together else [(seed,) for seed in task.seeds]
        self.count = len(self.groups[0])
        labels = [noisy_labels(task, seeds) for seeds in self.groups]
        self.x, self._labels = self.put((task.dataset.train.x, labels))

    def put(self, tree: PyTree, axis: int | None = None) -> PyTree:
        """Places arrays on the devices, which share an axis of them, or have each the whole."""
        spec = () if axis is None else (*[None] * axis, "batch")
        return jax.device_put(tree, NamedSharding(self.mesh, PartitionSpec(*spec)))

    def jit(self, f: Function, **options: Any) -> Any:
        """``f``, compiled, with results that each of the devices has."""
        return jax.jit(f, out_shardings=NamedSharding(self.mesh, PartitionSpec()), **options)

    def epoch(self, group: int, batch_size: int, epoch: int) -> tuple[jax.Array, jax.Array]:
        """For each seed of the group labels, (seeds, examples), and the order of the examples.

        The order is indices per step, int32, (seeds, steps, batch_size), which drop the rest.
        """
        examples, seeds = len(self.task.dataset.train.y), self.groups[group]
        steps = examples // batch_size
        orders = [np.random.default_rng([s, 1, epoch]).permutation(examples) for s in seeds]
        indices = np.stack(orders)[:, : steps * batch_size].astype(np.int32)
        return self._labels[group], self.put(indices.reshape(-1, steps, batch_size), 2)
