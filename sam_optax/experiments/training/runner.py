"""One method on its way, from one seed or several at once: epochs, timed."""

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from sam_optax.experiments.training import feed, measures
from sam_optax.experiments.training.devices import Devices
from sam_optax.experiments.training.program import Program
from sam_optax.experiments.training.task import Entry, Task, batch_indices, keys, noisy_labels

STRETCH = 2.0
"""Seconds of training between two looks at the clock, roughly."""
STEPS = 20
"""Steps between two looks where several processes must agree on them, or batches are fed."""


class Runner:
    """A method on its way.

    Args:
      name: of the method in this run.
      task: what is trained on.
      entry: the method.
      seeds: those that are trained at once.
      program: what is compiled, of runners of this method that differ in their seeds alone.
      x: all examples on the devices, or ``None`` where batches are fed.
      place: the devices.

    Attributes:
      state: the training, an axis of seeds in front of every leaf.
      seconds: of each epoch, training steps alone.
    """

    def __init__(
        self,
        name: str,
        task: Task,
        entry: Entry,
        seeds: tuple[int, ...],
        program: Program,
        x: Any,
        place: Devices,
    ) -> None:
        self.name, self.entry, self.seeds = name, entry, seeds
        self.seconds: list[float] = []
        self.steps = task.steps_per_epoch(entry.recipe)
        self._task, self._program, self._x, self._place = task, program, x, place
        self._keys = place.put(keys(seeds, 1))
        self._labels = noisy_labels(task, seeds)
        if x is not None:
            self._labels = place.put(self._labels)
        self.state: Any = None

    @property
    def compile_seconds(self) -> float:
        """Of the training steps."""
        return self._program.compile_seconds

    @property
    def variables(self) -> dict[str, Any]:
        """What the networks are applied with."""
        return measures.variables(self.state.params, self.state.batch_stats)

    def start(self, variables: Any) -> None:
        """Takes the initial variables, an axis of seeds in front."""
        self.state = self._program.init(self._keys, variables)

    def compile(self, watch: bool) -> None:
        """Compiles a stretch of an epoch, and with ``watch`` a look at a step, unless it is."""
        per_seed = self.state, self._keys, self._epoch_keys(0)
        if self._x is None:
            rows = next(self._batches(0))
            self._program.compile_fed(*rows, np.int32(0), *per_seed)
            return
        arguments = *per_seed, self._labels, self._indices(0)
        self._program.compile_stretch(self._x, np.int32(0), np.int32(1), *arguments)
        if watch:
            self._program.compile_look(self._x, *self._look_arguments(0))

    def run_epoch(self, epoch: int, tick: Callable[[float, float], None]) -> None:
        """Trains for an epoch and takes the time.

        Args:
          epoch: from 0; decides the order of examples and all other draws.
          tick: is told ``(seconds, share)`` of each part of the epoch that is done.
        """
        per_seed = self._keys, self._epoch_keys(epoch)
        if self._x is None:
            spent = self._feed(epoch, per_seed, tick)
        else:
            spent = self._stretches((*per_seed, self._labels, self._indices(epoch)), tick)
        self.seconds.append(spent)

    def _stretches(self, per_seed: tuple[Any, ...], tick: Callable[[float, float], None]) -> float:
        done, spent = 0, 0.0
        while done < self.steps:
            stop = min(self.steps, done + self._next(done, spent))
            start = time.perf_counter()
            bounds = np.int32(done), np.int32(stop)
            self.state, _ = jax.block_until_ready(
                self._program.stretch(self._x, *bounds, self.state, *per_seed)
            )
            seconds = time.perf_counter() - start
            tick(seconds, (stop - done) / self.steps)
            done, spent = stop, spent + seconds
        return spent

    def _next(self, done: int, spent: float) -> int:
        """Steps of the next stretch: about ``STRETCH`` seconds of them."""
        if jax.process_count() > 1:
            return STEPS
        if done:
            return max(1, int(STRETCH * done / spent))
        if self.seconds:
            return max(1, int(STRETCH * self.steps / self.seconds[-1]))
        return 1

    def _feed(
        self, epoch: int, per_seed: tuple[Any, ...], tick: Callable[[float, float], None]
    ) -> float:
        start = last = time.perf_counter()
        told = 0
        for i, rows in enumerate(self._batches(epoch)):
            self.state, loss = self._program.fed(*rows, np.int32(i), self.state, *per_seed)
            if (i + 1) % STEPS == 0 or i + 1 == self.steps:
                jax.block_until_ready(loss)
                now = time.perf_counter()
                tick(now - last, (i + 1 - told) / self.steps)
                last, told = now, i + 1
        return last - start

    def _batches(self, epoch: int) -> Any:
        """The batches of an epoch on the devices."""
        (seed,), size = self.seeds, self.entry.recipe.batch_size
        rows = self._place.rows(size)
        dataset = self._task.dataset
        for x, index in feed.train_batches(dataset, size, seed, epoch, 0, rows):
            yield self._place.put_rows((x, self._labels[0][index]))

    def look(self, epoch: int) -> dict[str, np.ndarray]:
        """A step on the epoch's first batch in numbers, by name; empty if it is not watched."""
        return jax.device_get(self._program.look(self._x, *self._look_arguments(epoch)))

    def _look_arguments(self, epoch: int) -> tuple[Any, ...]:
        first = self._indices(epoch)[:, 0]
        return self.state, self._keys, self._epoch_keys(epoch), self._labels, first

    def _epoch_keys(self, epoch: int) -> Any:
        return self._place.put(keys(self.seeds, 2 + epoch))

    def _indices(self, epoch: int) -> Any:
        found = batch_indices(self._task, self.entry.recipe, self.seeds, epoch)
        return self._place.put(found, 2)
