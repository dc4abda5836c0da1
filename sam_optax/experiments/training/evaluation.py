"""Loss, accuracy and sharpness of a run's networks, compiled once for all methods."""

import functools
from typing import Any

import jax
import numpy as np

from sam_optax.experiments.training import feed, measures
from sam_optax.experiments.training.devices import Devices
from sam_optax.experiments.training.measures import BLOCK, Blocks
from sam_optax.experiments.training.program import over_seeds
from sam_optax.experiments.training.task import Task, noisy_labels


class Evaluation:
    """Measures the networks of some seeds after an epoch and at the end.

    Args:
      task: what is trained.
      count: number of seeds at once.
      place: the devices.
    """

    def __init__(self, task: Task, count: int, place: Devices) -> None:
        self._task, self._place = task, place
        test = task.dataset.test
        self._test: Blocks | None = None
        if isinstance(test.x, np.ndarray):
            self._test = place.put(measures.blocks(test.x, test.y, place.count), 1)
        x, self._index = measures.measured(task.dataset.train)
        train = measures.blocks(x, np.zeros(len(x), np.int32), place.count)
        self._train = Blocks(place.put(train.x, 1), None, place.put(train.weight, 1))

        # The examples are arguments: as constants of the program they would be compiled into it.
        def losses(variables: Any, train: Blocks, test: Blocks | None) -> Any:
            def one(variables: Any, y: Any) -> dict[str, jax.Array]:
                found = {"train_loss": measures.mean_loss(task, variables, train._replace(y=y))}
                if test is not None:
                    found["test_accuracy"] = measures.accuracy(task, variables, test)
                return found

            return over_seeds(one, count)(variables, train.y)

        def sharpness(variables: Any, train: Blocks) -> Any:
            def one(variables: Any, y: Any) -> jax.Array:
                return measures.sharpness(task, variables, train._replace(y=y))

            return over_seeds(one, count)(variables, train.y)

        def hits(variables: Any, batch: Blocks) -> jax.Array:
            return measures.correct(task, jax.tree.map(lambda leaf: leaf[0], variables), batch)

        whole = None if place.count == 1 else place.whole
        self._losses, self._sharpness, self._hits = (
            jax.jit(f, out_shardings=whole) for f in (losses, sharpness, hits)
        )

    @functools.lru_cache(maxsize=1)  # noqa: B019 (an evaluation lives as long as the run)
    def _labelled(self, seeds: tuple[int, ...]) -> Blocks:
        labels = noisy_labels(self._task, seeds)[:, self._index]
        none = np.empty((len(self._index), 0), np.uint8)
        y = measures.blocks(none, labels, self._place.count).y
        return self._train._replace(y=self._place.put(y, 2))

    def after_epoch(self, variables: Any, seeds: tuple[int, ...]) -> dict[str, np.ndarray]:
        """Mean training loss in nats and test accuracy in [0, 1], one of each for each seed."""
        found = jax.device_get(self._losses(variables, self._labelled(seeds), self._test))
        if self._test is None:
            found["test_accuracy"] = np.array([self._accuracy(variables)], np.float32)
        return found

    def _accuracy(self, variables: Any) -> float:
        test, size = self._task.dataset.test, BLOCK * self._place.count
        found = 0.0
        for batch in feed.test_batches(test, size, self._place.rows(size)):
            found += self._hits(variables, self._place.put_rows(Blocks(*batch)))
        return float(found) / len(test.y)

    def sharpness(self, variables: Any, seeds: tuple[int, ...]) -> np.ndarray:
        """L(w + ε) − L(w) in nats, one for each seed."""
        return jax.device_get(self._sharpness(variables, self._labelled(seeds)))

    def compile_losses(self, variables: Any, seeds: tuple[int, ...]) -> None:
        """Compiles what :meth:`after_epoch` runs."""
        lowered = self._losses.lower(variables, self._labelled(seeds), self._test)
        self._losses = lowered.compile()

    def compile_sharpness(self, variables: Any, seeds: tuple[int, ...]) -> None:
        """Compiles what :meth:`sharpness` runs."""
        self._sharpness = self._sharpness.lower(variables, self._labelled(seeds)).compile()
