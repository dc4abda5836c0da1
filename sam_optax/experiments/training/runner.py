"""Trains one method from all seeds: its compiled steps and its timed epochs."""

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sam_optax.experiments.training import feed
from sam_optax.experiments.training.devices import Devices, over_seeds
from sam_optax.experiments.training.step import MethodStep, State
from sam_optax.experiments.training.task import EPOCHS, METHOD, Entry, Task, key, noisy_labels
from sam_optax.experiments.types import Function, PyTree, Record

STRETCH = 2.0
"""Approximate seconds of training between two readings of the clock."""
STEPS = 20
"""Steps between two readings if several processes must agree on them, or batches are fed."""


class Source:
    """The source of the examples for all methods: the devices or the disk.

    ``groups`` are the seeds that are trained together; only one seed at a time from disk.
    """

    def __init__(self, task: Task, groups: list[tuple[int, ...]], place: Devices) -> None:
        self.task, self.groups, self.place = task, groups, place
        self.resident = isinstance(task.dataset.train.x, np.ndarray)
        self._labels = [noisy_labels(task, seeds) for seeds in groups]
        if self.resident:
            self._x, self._labels = place.put((task.dataset.train.x, self._labels))

    def labels(self, group: int) -> PyTree:
        """Labels (seeds, examples) on the devices; ``None`` if they come with the batches."""
        return self._labels[group] if self.resident else None

    def epoch(self, group: int, batch_size: int, epoch: int) -> tuple[Iterator[PyTree], PyTree]:
        """The input of each call of a step: all examples again, or a batch with its labels.

        In the former case with the indices of the examples, (seeds, steps, batch_size).
        """
        seeds, dataset = self.groups[group], self.task.dataset
        if self.resident:
            orders = [feed.order(len(dataset.train.y), batch_size, s, epoch) for s in seeds]
            return itertools.repeat(self._x), self.place.put(np.stack(orders), 2)
        rows, labels = self.place.rows(batch_size), self._labels[group][0]
        batches = feed.train_batches(dataset, batch_size, seeds[0], epoch, rows)
        return (self.place.put_rows((x, labels[index])) for x, index in batches), None


class Runner:
    """A method in training.

    ``looped``: one call of the program runs many steps; otherwise each step is a call.
    """

    def __init__(self, name: str, entry: Entry, source: Source, looped: bool) -> None:
        self.name, self.entry, self._source, self._looped = name, entry, source, looped
        self.steps = source.task.steps_per_epoch(entry.recipe)
        self.states: list[State] = []  # per group; every leaf has a leading axis of seeds
        self.curve: list[dict[str, np.ndarray]] = []  # measures after each epoch, (seeds,) each
        self.seconds: list[float] = []  # of the training steps per epoch, all seeds
        self.compile_seconds = 0.0
        self.program: Any = None
        self._look_program: Any = None
        self._seeds = source.place.put([np.array(seeds, np.int32) for seeds in source.groups])
        self._values: list[Record] = [{} for _ in source.groups]
        self._count = len(source.groups[0])

        def first(seed: jax.Array, variables: PyTree) -> State:
            return MethodStep(source.task, entry).init(key(seed, METHOD), variables)

        self._init = self._jit(over_seeds(first, self._count))

    @property
    def variables(self) -> list[PyTree]:
        """The variables of the networks of each group."""
        return [{"params": state.params, **state.rest} for state in self.states]

    @property
    def diverged(self) -> bool:
        """Whether all seeds have diverged."""
        return bool(self.curve) and bool(np.isnan(self.curve[-1]["train_loss"]).all())

    def start(self, variables: list[PyTree], values: list[PyTree] | None = None) -> None:
        """Takes the initial variables of each group, for a training from the beginning.

        ``values`` of each group are those for :meth:`Entry.at`, one for each seed. The program
        is compiled for any values.
        """
        if values is not None:
            self._values = self._source.place.put(values)
        variables = jax.tree.map(jnp.copy, variables)  # steps donate their inputs
        self.states = [self._init(*pair) for pair in zip(self._seeds, variables, strict=True)]
        self.curve, self.seconds = [], []

    def compile(self, watch: bool) -> None:
        """Compiles the steps, and with ``watch`` the diagnostics of a step."""
        begin = time.perf_counter()
        calls, *per_seed = self._arguments(0, 0)
        x, zero, one = next(calls), np.int32(0), np.int32(1)
        steps = self._jit(self._steps, donate_argnums=4)
        self.program = steps.lower(x, zero, one, zero, self.states[0], *per_seed).compile()
        self.compile_seconds = time.perf_counter() - begin
        if watch:
            numbers = self._jit(self._look).lower(x, zero, self.states[0], *per_seed)
            self._look_program = numbers.compile()

    def run_epoch(self, epoch: int, tick: Callable[[float, float], None]) -> None:
        """Trains for one epoch (counted from 0) and measures the time.

        ``tick`` is called with ``(seconds, share)`` of each finished part of the epoch.
        """
        spent, total = 0.0, self.steps * len(self.states)
        for group in range(len(self.states)):
            calls, *per_seed = self._arguments(group, epoch)
            state, done = self.states[group], 0
            while done < self.steps:
                stop = min(self.steps, done + self._stretch(group * self.steps + done, spent))
                bounds = [done, stop] if self._looped else range(done, stop + 1)
                start = time.perf_counter()
                for i, j in itertools.pairwise(map(np.int32, bounds)):
                    state = self.program(next(calls), i, j, np.int32(epoch), state, *per_seed)
                jax.block_until_ready(state)
                seconds = time.perf_counter() - start
                tick(seconds, (stop - done) / total)
                done, spent = stop, spent + seconds
            self.states[group] = state
        self.seconds.append(spent)

    def look(self, epoch: int) -> list[dict[str, np.ndarray]]:
        """Diagnostics of a step on the epoch's first batch per group, with ``watch``."""
        if self._look_program is None:
            return []
        found = []
        for group, state in enumerate(self.states):
            calls, *per_seed = self._arguments(group, epoch)
            numbers = self._look_program(next(calls), np.int32(epoch), state, *per_seed)
            found.append(jax.device_get(numbers))
        return found

    def _arguments(self, group: int, epoch: int) -> tuple[Any, ...]:
        """The input of each call from :meth:`Source.epoch`; seeds, values, labels and indices."""
        calls, indices = self._source.epoch(group, self.entry.recipe.batch_size, epoch)
        labels = self._source.labels(group)
        return calls, self._seeds[group], self._values[group], labels, indices

    def _stretch(self, done: int, spent: float) -> int:
        """Steps until the next reading of the clock, about ``STRETCH`` seconds."""
        if jax.process_count() > 1 or not self._source.resident:
            return STEPS
        if done:
            return max(1, int(STRETCH * done / spent))
        if self.seconds:
            return max(1, int(STRETCH * self.steps * len(self.states) / self.seconds[-1]))
        return 1

    def _jit(self, f: Function, **options: Any) -> Any:
        place = self._source.place
        whole = place.sharding() if place.count > 1 else None
        return jax.jit(f, out_shardings=whole, **options)

    def _steps(
        self, x: PyTree, start: jax.Array, stop: jax.Array, epoch: jax.Array, *per_seed: PyTree
    ) -> State:
        """Steps ``start`` to ``stop`` of an epoch, both traced, so that one program serves all."""

        def one(
            state: State, seed: jax.Array, values: PyTree, labels: PyTree, indices: PyTree
        ) -> State:
            method_key, epoch_key = key(seed, METHOD), key(seed, EPOCHS + epoch)
            step = MethodStep(self._source.task, self.entry.at(values))

            def body(i: jax.Array, state: State) -> State:
                batch = x if indices is None else (x[indices[i]], labels[indices[i]])
                step_key = jax.random.fold_in(epoch_key, i)
                return step.take(method_key, state, batch, step_key, self._data(x, labels))

            if not self._looped:
                return body(start, state)
            return jax.lax.fori_loop(start, stop, body, state)

        return over_seeds(one, self._count)(*per_seed)

    def _look(self, x: PyTree, epoch: jax.Array, *per_seed: PyTree) -> dict[str, jax.Array]:
        def one(
            state: State, seed: jax.Array, values: PyTree, labels: PyTree, indices: PyTree
        ) -> Record:
            method_key, epoch_key = key(seed, METHOD), key(seed, EPOCHS + epoch)
            batch = x[indices[0]], labels[indices[0]]
            step = MethodStep(self._source.task, self.entry.at(values))
            return step.look(method_key, state, batch, epoch_key, self._data(x, labels))

        return over_seeds(one, self._count)(*per_seed)

    def _data(self, x: PyTree, labels: PyTree) -> PyTree:
        return (x, labels) if self.entry.variant.method.needs_data else None
