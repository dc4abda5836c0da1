"""The training step of one seed, ``(state, batch) -> state``."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sam_optax.experiments.methods.method import Step
from sam_optax.experiments.networks import augmentation
from sam_optax.experiments.training import measures
from sam_optax.experiments.training.task import Entry, Task
from sam_optax.experiments.types import PyTree


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
        self._tx = entry.variant.transformation(task.base(entry.recipe), key)

    def init(self, variables: PyTree) -> State:
        """The state before the first step, given the network's initial variables."""
        params, y = variables["params"], self._task.dataset.train.y
        empty = self._task.example, jnp.zeros((1, *y.shape[1:]), y.dtype)
        batch = jax.tree.map(lambda leaf: jnp.repeat(leaf, self._recipe.batch_size, 0), empty)
        previous = self._kept(self._augmented(self._key, batch))
        rest = {name: of for name, of in variables.items() if name != "params"}
        return State(params, self._tx.init(params), rest, previous)

    def take(self, state: State, batch: PyTree, step_key: jax.Array) -> State:
        """The state after a step, both passes of which draw the same dropout.

        Each of several groups of the batch is normalized by its own statistics, and the running
        statistics are averaged. The variables that are no params are those of the first pass, or of
        an additional pass at the params if a method computes its own gradients.
        """
        batch = self._augmented(jax.random.fold_in(step_key, 1), batch)
        dropout, groups = jax.random.fold_in(step_key, 2), self._recipe.groups

        def losses(params: optax.Params, some: PyTree, key: jax.Array = dropout) -> Any:
            return measures.losses(self._task, {"params": params, **state.rest}, some, key)

        def loss(params: optax.Params, *group: jax.Array) -> tuple[jax.Array, PyTree]:
            some, key = batch, dropout
            for i in group:  # if the step asks for one
                some, key = _group(batch, groups, i), jax.random.fold_in(dropout, i)
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


def _group(batch: PyTree, groups: int, i: jax.Array) -> PyTree:
    """One of equal parts of a batch: every ``groups``-th example, from the i-th on.

    If the batch is split over devices, this is an equal share of each device's part, and the same
    examples for any number of devices that divides the size of a group.
    """
    return jax.tree.map(lambda leaf: leaf.reshape(-1, groups, *leaf.shape[1:])[:, i], batch)
