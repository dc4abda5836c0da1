"""Trains one method from all seeds: its compiled steps and its timed epochs."""

import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sam_optax.experiments.training.devices import jit, over_seeds
from sam_optax.experiments.training.feed import Source
from sam_optax.experiments.training.step import MethodStep, State
from sam_optax.experiments.training.task import EPOCHS, METHOD, Entry, key
from sam_optax.experiments.types import PyTree

STRETCH = 2.0
"""Approximate seconds of training between two readings of the clock."""


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
        self._stretch = 1  # steps between two readings of the clock
        self._seeds = source.put([np.array(seeds, np.int32) for seeds in source.groups])
        self._values: dict[str, jax.Array] = {}

        def first(seed: jax.Array, variables: PyTree) -> State:
            return MethodStep(source.task, entry, key(seed, METHOD)).init(variables)

        self._init = jit(source.mesh, over_seeds(first, source.count))

    @property
    def variables(self) -> list[PyTree]:
        """The variables of the networks of each group."""
        return [{"params": state.params, **state.rest} for state in self.states]

    @property
    def diverged(self) -> bool:
        """Whether all seeds have diverged."""
        return bool(self.curve) and bool(np.isnan(self.curve[-1]["train_loss"]).all())

    @property
    def curves(self) -> dict[str, np.ndarray]:
        """(epochs, seeds); epochs that were skipped after all seeds had diverged are NaN."""
        skipped = (0, self.entry.recipe.epochs - len(self.curve)), (0, 0)
        each = {k: np.array([point[k] for point in self.curve], np.float32) for k in self.curve[0]}
        return {k: np.pad(values, skipped, constant_values=np.nan) for k, values in each.items()}

    def start(self, variables: list[PyTree], values: Mapping[str, float] = {}) -> None:
        """Takes the initial variables of each group, for a training from the beginning.

        ``values`` are those for :meth:`Entry.at`; the program is compiled for any.
        """
        count, put = self._source.count, self._source.put
        self._values = put({k: np.full(count, value, np.float32) for k, value in values.items()})
        variables = jax.tree.map(jnp.copy, variables)  # steps donate their inputs
        self.states = [self._init(*pair) for pair in zip(self._seeds, variables, strict=True)]
        self.curve, self.seconds = [], []

    def compile(self) -> None:
        """Compiles the steps."""
        begin, zero = time.perf_counter(), np.int32(0)
        calls, *per_seed = self._arguments(0, 0)
        steps = jit(self._source.mesh, self._steps, donate_argnums=4)
        given = next(calls), zero, zero, zero, self.states[0], *per_seed
        self._program = steps.lower(*given).compile()
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
                bounds = [done, stop] if self._source.together else range(done, stop + 1)
                start = time.perf_counter()
                for i, j in itertools.pairwise(map(np.int32, bounds)):
                    state = self._program(next(calls), i, j, np.int32(epoch), state, *per_seed)
                jax.block_until_ready(state)
                seconds = time.perf_counter() - start
                tick((stop - done) / total)
                self.seconds[-1] += seconds
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

        def one(
            state: State, seed: jax.Array, values: PyTree, labels: PyTree, indices: PyTree
        ) -> State:
            entry, data = self.entry.at(values), (x, labels)
            step = MethodStep(self._source.task, entry, key(seed, METHOD), data)
            epoch_key = key(seed, EPOCHS + epoch)

            def body(i: jax.Array, state: State) -> State:
                batch = x if indices is None else (x[indices[i]], labels[indices[i]])
                return step.take(state, batch, jax.random.fold_in(epoch_key, i))

            if not self._source.together:
                return body(start, state)
            return jax.lax.fori_loop(start, stop, body, state)

        return over_seeds(one, self._source.count)(*per_seed)
