"""Trains one method from all seeds: its compiled steps and its timed epochs."""

import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sam_optax.experiments.training.devices import over_seeds
from sam_optax.experiments.training.feed import Source
from sam_optax.experiments.training.step import MethodStep, State
from sam_optax.experiments.training.task import EPOCHS, METHOD, Entry, key
from sam_optax.experiments.types import Function, PyTree, Record

STRETCH = 2.0
"""Approximate seconds of training between two readings of the clock."""
STEPS = 20
"""Steps between two readings if several processes must agree on them, or batches are fed."""


class Runner:
    """A method in training."""

    def __init__(self, name: str, entry: Entry, source: Source) -> None:
        self.name, self.entry, self._source = name, entry, source
        self.steps = source.task.steps_per_epoch(entry.recipe)
        self.states: list[State] = []  # per group; every leaf has a leading axis of seeds
        self.curve: list[dict[str, list[float]]] = []  # measures of each seed after each epoch
        self.seconds: list[float] = []  # of the training steps per epoch, all seeds
        self.compile_seconds = 0.0
        self._program: Any = None
        self._stretch = STEPS if jax.process_count() > 1 or not source.resident else 1
        self._seeds = source.place.put([np.array(seeds, np.int32) for seeds in source.groups])
        self._values: Record = {}
        self._count = len(source.groups[0])

        def first(seed: jax.Array, variables: PyTree) -> State:
            return MethodStep(source.task, entry, key(seed, METHOD)).init(variables)

        self._init = source.place.jit(over_seeds(first, self._count))

    @property
    def variables(self) -> list[PyTree]:
        """The variables of the networks of each group."""
        return [{"params": state.params, **state.rest} for state in self.states]

    @property
    def diverged(self) -> bool:
        """Whether all seeds have diverged."""
        return bool(self.curve) and bool(np.isnan(self.curve[-1]["train_loss"]).all())

    def start(self, variables: list[PyTree], values: Mapping[str, float] = {}) -> None:
        """Takes the initial variables of each group, for a training from the beginning.

        ``values`` are those for :meth:`Entry.at`; the program is compiled for any.
        """
        each = {name: np.full(self._count, value, np.float32) for name, value in values.items()}
        self._values = self._source.place.put(each)
        variables = jax.tree.map(jnp.copy, variables)  # steps donate their inputs
        self.states = [self._init(*pair) for pair in zip(self._seeds, variables, strict=True)]
        self.curve, self.seconds = [], []

    def compile(self) -> None:
        """Compiles the steps."""
        begin, jit = time.perf_counter(), self._source.place.jit
        calls, *per_seed = self._arguments(0, 0)
        x, zero, given = next(calls), np.int32(0), (self.states[0], *per_seed)
        steps = jit(self._steps, donate_argnums=4).lower(x, zero, zero, zero, *given)
        self._program = steps.compile()
        self.compile_seconds = time.perf_counter() - begin

    def run_epoch(self, epoch: int, tick: Callable[[float], None]) -> None:
        """Trains for one epoch (counted from 0) and measures the time.

        ``tick`` is called with the share of each finished part of the epoch.
        """
        if self._program is None:
            self.compile()
        total = self.steps * len(self.states)
        self.seconds.append(0.0)
        for group, state in enumerate(self.states):
            calls, *per_seed = self._arguments(group, epoch)
            done = 0
            while done < self.steps:
                stop = min(self.steps, done + self._stretch)
                bounds = [done, stop] if self._source.looped else range(done, stop + 1)
                start = time.perf_counter()
                for i, j in itertools.pairwise(map(np.int32, bounds)):
                    state = self._program(next(calls), i, j, np.int32(epoch), state, *per_seed)
                jax.block_until_ready(state)
                seconds = time.perf_counter() - start
                tick((stop - done) / total)
                self.seconds[-1] += seconds
                if jax.process_count() == 1 and self._source.resident:
                    self._stretch = max(1, int(STRETCH * (stop - done) / seconds))
                done = stop
            self.states[group] = state

    def _arguments(self, group: int, epoch: int) -> tuple[Any, ...]:
        """The input of each call; seeds, values, labels and indices: see :meth:`Source.epoch`."""
        calls, per_seed = self._source.epoch(group, self.entry.recipe.batch_size, epoch)
        return calls, self._seeds[group], self._values, *per_seed

    def _steps(
        self, x: PyTree, start: jax.Array, stop: jax.Array, epoch: jax.Array, *per_seed: PyTree
    ) -> State:
        """Steps ``start`` to ``stop`` of an epoch, both traced, so that one program serves all."""

        def one(state: State, *of_seed: PyTree) -> State:
            step, batch, epoch_key = self._of_seed(x, epoch, *of_seed)

            def body(i: jax.Array, state: State) -> State:
                return step.take(state, batch(i), jax.random.fold_in(epoch_key, i))

            if not self._source.looped:
                return body(start, state)
            return jax.lax.fori_loop(start, stop, body, state)

        return over_seeds(one, self._count)(*per_seed)

    def _of_seed(
        self,
        x: PyTree,
        epoch: jax.Array,
        seed: jax.Array,
        values: PyTree,
        labels: PyTree,
        indices: PyTree,
    ) -> tuple[MethodStep, Function, jax.Array]:
        """A seed's steps, their batches in an epoch, and its key of the epoch."""

        def batch(i: jax.Array) -> PyTree:
            return x if indices is None else (x[indices[i]], labels[indices[i]])

        entry, data = self.entry.at(values), (x, labels)
        step = MethodStep(self._source.task, entry, key(seed, METHOD), data)
        return step, batch, key(seed, EPOCHS + epoch)
