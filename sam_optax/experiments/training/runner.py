"""Trains one method: its step, compiled for all seeds, and its timed epochs."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sam_optax.experiments.methods.method import Step
from sam_optax.experiments.networks import augmentation
from sam_optax.experiments.training import measures
from sam_optax.experiments.training.devices import Source, over_seeds
from sam_optax.experiments.training.task import EPOCHS, METHOD, Entry, Task, key
from sam_optax.experiments.types import PyTree

STRETCH = 2.0
"""Approximate seconds of training between two readings of the clock."""


class State(NamedTuple):
    """State of training between two steps."""

    params: optax.Params
    opt_state: optax.OptState
    rest: PyTree  # the network's other variables, such as batch_stats
    previous: PyTree  # the batch of the last step, if the method needs it; else empty


class MethodStep:
    """The steps of a method. ``key`` is for the method's draws, ``step_key`` for all others.

    ``data`` contains all training examples, for methods that need them.
    """

    def __init__(self, task: Task, entry: Entry, key: jax.Array, data: PyTree = None) -> None:
        self._task, self._recipe, self._variant = task, entry.recipe, entry.variant
        self._key, self._data = key, data
        self._tx = entry.variant.transformation(entry.recipe.base(len(task.dataset.train.y)), key)

    def init(self, variables: PyTree) -> State:
        """The state before the first step, given the network's initial variables."""
        params, y = variables["params"], self._task.dataset.train.y
        empty = self._task.example, jnp.zeros((1, *y.shape[1:]), y.dtype)
        batch = jax.tree.map(lambda leaf: jnp.repeat(leaf, self._recipe.batch_size, 0), empty)
        previous = self._kept(self._augmented(self._key, batch))
        rest = {name: of for name, of in variables.items() if name != "params"}
        return State(params, self._variant.init(self._tx, params), rest, previous)

    def take(self, state: State, batch: PyTree, step_key: jax.Array) -> State:
        """The state after a step, both passes of which draw the same dropout.

        Each of several groups of the batch is normalized by its own statistics, and the running
        statistics are averaged. The variables that are no params are those of the first pass, or of
        an additional pass at the params if a method computes its own gradients.
        """
        batch = self._augmented(jax.random.fold_in(step_key, 1), batch)
        dropout, groups = jax.random.fold_in(step_key, 2), self._recipe.groups
        # A group is every groups-th example: an equal share of each device's part of the batch, and
        # the same examples for any number of devices that divides its size.
        parts = jax.tree.map(lambda leaf: leaf.reshape(-1, groups, *leaf.shape[1:]), batch)

        def losses(params: optax.Params, some: PyTree, key: jax.Array = dropout) -> Any:
            return measures.losses(self._task, {"params": params, **state.rest}, some, key)

        def loss(params: optax.Params, i: jax.Array | None = None) -> tuple[jax.Array, PyTree]:
            some, key = batch, dropout
            if i is not None:  # the loss of this group
                some, key = jax.tree.map(lambda leaf: leaf[:, i], parts), jax.random.fold_in(key, i)
            each, rest = losses(params, some, key)
            return jnp.mean(each), rest

        def last(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(state.opt_state.step == 0, new, old)

        losses_fn, both = lambda *args: losses(*args)[0], jax.value_and_grad(loss, has_aux=True)
        previous = jax.tree.map(last, self._kept(batch), state.previous)
        step = Step(losses_fn, both, state.params, batch, step_key, self._data, previous)
        params, opt_state, first = self._variant.update(self._tx, state.opt_state, step)
        rest = state.rest
        if first is not None:
            rest = first[1]
        elif rest:
            rest = losses(state.params, batch)[1]
        return State(params, opt_state, rest, self._kept(batch))

    def _kept(self, batch: PyTree) -> PyTree:
        return batch if self._variant.method.needs_previous else ()

    def _augmented(self, key: jax.Array, batch: PyTree) -> PyTree:
        """Examples as the network receives them, and their labels or label distributions."""
        (x, y), recipe, dataset = batch, self._recipe, self._task.dataset
        keys = jax.random.split(key, 4)
        x = augmentation.crop(keys[0], x, recipe.crop)
        if recipe.flip:
            x = augmentation.flip(keys[1], x)
        x = augmentation.cutout(keys[2], measures.ready(dataset, x), recipe.cutout)
        if not (recipe.label_smoothing or recipe.mixup):
            return x, y
        y = optax.smooth_labels(jax.nn.one_hot(y, dataset.classes), recipe.label_smoothing)
        return augmentation.mixup(keys[3], x, y, recipe.mixup)


@dataclasses.dataclass
class Outcome:
    """The outcome of one method.

    The curves are ``train_loss`` in nats, and the test accuracy in [0, 1] or the user's metric.
    """

    variables: dict[int, PyTree]  # of the trained network of each seed
    curves: dict[str, np.ndarray]  # after each epoch, (epochs, seeds)
    sharpness: np.ndarray  # nats, (seeds,)
    seconds: list[float]  # of the training steps per epoch, all seeds
    compile_seconds: float  # of the training steps
    cost: float  # of a step relative to SGD's, the median over rounds; NaN without SGD


class Runner:
    """A method in training."""

    def __init__(self, name: str, entry: Entry, source: Source) -> None:
        self.name, self.entry, self._source = name, entry, source
        self.steps = len(source.task.dataset.train.y) // entry.recipe.batch_size
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

        self._init = source.jit(over_seeds(first, source.count))

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
        steps = self._source.jit(self._steps, donate_argnums=4)
        given = self._source.x, zero, zero, zero, self.states[0], *self._per_seed(0, 0)
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
            x, per_seed, done = self._source.x, self._per_seed(group, epoch), 0
            while done < self.steps:
                stop = min(self.steps, done + self._stretch)
                bounds = [done, stop] if self._source.together else range(done, stop + 1)
                start = time.perf_counter()
                for i, j in itertools.pairwise(map(np.int32, bounds)):
                    state = self._program(x, i, j, np.int32(epoch), state, *per_seed)
                jax.block_until_ready(state)
                seconds = time.perf_counter() - start
                tick((stop - done) / total)
                self.seconds[-1] += seconds
                self._stretch = max(1, int(STRETCH * (stop - done) / seconds))
                done = stop
            self.states[group] = state

    def _per_seed(self, group: int, epoch: int) -> tuple[PyTree, ...]:
        """Seeds, values, labels and indices: see :meth:`Source.epoch`."""
        per_seed = self._source.epoch(group, self.entry.recipe.batch_size, epoch)
        return self._seeds[group], self._values, *per_seed

    def _steps(
        self, x: jax.Array, start: jax.Array, stop: jax.Array, epoch: jax.Array, *per_seed: PyTree
    ) -> State:
        """Steps ``start`` to ``stop`` of an epoch, both traced, so that one program serves all."""

        def one(
            state: State, seed: jax.Array, values: PyTree, labels: PyTree, indices: PyTree
        ) -> State:
            entry, data = self.entry.at(values), (x, labels)
            step = MethodStep(self._source.task, entry, key(seed, METHOD), data)
            epoch_key = key(seed, EPOCHS + epoch)

            def body(i: jax.Array, state: State) -> State:
                batch = x[indices[i]], labels[indices[i]]
                return step.take(state, batch, jax.random.fold_in(epoch_key, i))

            if not self._source.together:
                return body(start, state)
            return jax.lax.fori_loop(start, stop, body, state)

        return over_seeds(one, self._source.count)(*per_seed)
