"""Loss, accuracy and sharpness of a run's networks, compiled once for all methods."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sam_optax
from sam_optax.experiments.training import feed, measures
from sam_optax.experiments.training.devices import Devices
from sam_optax.experiments.training.measures import BLOCK, Blocks
from sam_optax.experiments.training.program import over_seeds
from sam_optax.experiments.training.task import Task, noisy_labels


class Evaluation:
    """Measures the networks of some seeds, block by block of the examples.

    Args:
      task: what is trained.
      count: number of seeds at once.
      place: the devices.
    """

    def __init__(self, task: Task, count: int, place: Devices) -> None:
        self._task, self._place = task, place
        x, self._index = measures.measured(task.dataset.train)
        self._train = self._put(measures.blocks(x, np.zeros(len(x), np.int32), place.count))
        test = task.dataset.test
        self._test: list[Blocks] | None = None
        if isinstance(test.x, np.ndarray):
            self._test = self._put(measures.blocks(test.x, test.y, place.count))
        sam = sam_optax.sam(task.sharpness_rho)

        def loss(variables: Any, block: Blocks) -> jax.Array:
            return measures.total_loss(task, variables, block)

        def gradient(variables: Any, block: Blocks) -> Any:
            params = variables["params"]
            return jax.value_and_grad(lambda p: loss({**variables, "params": p}, block))(params)

        def perturbed(variables: Any, grads: Any) -> Any:
            params = variables["params"]
            moved, _ = sam.perturb_fn(params, grads, sam.init(params))
            return {**variables, "params": moved}

        def program(f: Callable[..., Any]) -> Any:
            """``f(variables, block)`` of all seeds, which may have labels of their own."""

            def of_block(variables: Any, block: Blocks) -> Any:
                seeds = jax.tree.leaves(variables)[0].shape[:1]
                y = jnp.broadcast_to(block.y, (*seeds, block.y.shape[-1]))
                one = over_seeds(lambda v, y: f(v, block._replace(y=y)), count)
                return one(variables, y)

            return jax.jit(of_block)

        self._loss, self._gradient = program(loss), program(gradient)
        self._hits = program(lambda v, block: measures.correct(task, v, block))
        self._perturbed = jax.jit(over_seeds(perturbed, count))
        self._add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b))

    def _put(self, found: Blocks) -> list[Blocks]:
        """Blocks on the devices, which share each of them."""
        weights = zip(found.x, found.y, found.weight, strict=True)
        return [Blocks(*(self._place.put(leaf, 0) for leaf in block)) for block in weights]

    @functools.cache  # noqa: B019 (an evaluation lives as long as the run)
    def _labelled(self, seeds: tuple[int, ...]) -> list[Blocks]:
        """The training examples that are measured, with the labels that each seed trains on."""
        labels = noisy_labels(self._task, seeds)[:, self._index]
        none = np.empty((len(self._index), 0), np.uint8)
        y = measures.blocks(none, labels, self._place.count).y
        return [
            block._replace(y=self._place.put(y[:, i], 1)) for i, block in enumerate(self._train)
        ]

    def _tested(self) -> Iterable[Blocks]:
        if self._test is not None:
            return self._test
        size = BLOCK * self._place.count
        batches = feed.test_batches(self._task.dataset.test, size, self._place.rows(size))
        return (self._place.put_rows(Blocks(*batch)) for batch in batches)

    def _total(self, f: Callable[..., Any], variables: Any, blocks: Iterable[Blocks]) -> Any:
        total = None
        for block in blocks:
            found = f(variables, block)
            total = found if total is None else self._add(total, found)
        return total

    def after_epoch(self, variables: Any, seeds: tuple[int, ...]) -> dict[str, np.ndarray]:
        """Mean training loss in nats and test accuracy in [0, 1], one of each for each seed."""
        train, test = len(self._index), len(self._task.dataset.test.y)
        loss = self._total(self._loss, variables, self._labelled(seeds))
        hits = self._total(self._hits, variables, self._tested())
        loss, hits = jax.device_get((loss, hits))
        return {"train_loss": loss / np.float32(train), "test_accuracy": hits / np.float32(test)}

    def sharpness(self, variables: Any, seeds: tuple[int, ...]) -> np.ndarray:
        """L(w + ε) − L(w) in nats, ε being SAM's for the full gradient, one for each seed.

        One gradient step of length ρ: a lower bound of the worst rise within ρ, and blind at a
        point where the gradient is zero.
        """
        blocks = self._labelled(seeds)
        loss, grads = self._total(self._gradient, variables, blocks)
        above = self._total(self._loss, self._perturbed(variables, grads), blocks)
        loss, above = jax.device_get((loss, above))
        n = np.float32(len(self._index))
        return above / n - loss / n

    def warm_up(self, variables: Any, seeds: tuple[int, ...]) -> None:
        """Compiles what :meth:`after_epoch` runs, so that the first epoch's takes no longer."""
        for f, block in (
            (self._loss, self._labelled(seeds)[0]),
            (self._hits, next(iter(self._tested()))),
        ):
            jax.block_until_ready(self._add(found := f(variables, block), found))
