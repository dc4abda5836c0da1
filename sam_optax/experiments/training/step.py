"""The training step of one seed, ``(state, batch) -> state``, and its diagnostics."""

from typing import NamedTuple

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

    def __init__(self, task: Task, entry: Entry) -> None:
        self._task, self._recipe, self._variant = task, entry.recipe, entry.variant
        self._base = task.base(entry.recipe)

    def init(self, key: jax.Array, variables: PyTree) -> State:
        """The state before the first step, given the network's initial variables."""
        tx = self._variant.transformation(self._base, key)
        params, y = variables["params"], self._task.dataset.train.y
        empty = self._task.example, jnp.zeros((1, *y.shape[1:]), y.dtype)
        batch = jax.tree.map(lambda leaf: jnp.repeat(leaf, self._recipe.batch_size, 0), empty)
        previous = self._kept(self._augmented(key, batch))
        rest = {name: of for name, of in variables.items() if name != "params"}
        return State(params, tx.init(params), rest, previous)

    def take(
        self, key: jax.Array, state: State, batch: PyTree, step_key: jax.Array, data: PyTree
    ) -> State:
        """The state after a step.

        The variables that are no params are those of the first pass, or of an additional pass at
        the params if a method computes its own gradients.
        """
        tx = self._variant.transformation(self._base, key)
        step = self._step(state, batch, step_key, data)
        params, opt_state, first = self._variant.update(tx, state.opt_state, step)
        if first is None and state.rest:
            first = self._loss(state, step.batch, _dropout(step_key), state.params)
        rest = state.rest if first is None else first[1]
        return State(params, opt_state, rest, self._kept(step.batch))

    def look(
        self, key: jax.Array, state: State, batch: PyTree, step_key: jax.Array, data: PyTree
    ) -> dict[str, jax.Array]:
        """The fields of :class:`sam_optax.StepInfo` for a step whose update is discarded.

        An unknown rise of the loss is NaN. Empty for the base optimizer.
        """
        step = self._step(state, batch, step_key, data)
        seen = self._variant.look(self._base, key, state.opt_state, step)
        if seen is None:
            return {}
        found = seen._asdict()
        known = found.pop("loss_known")
        return {**found, "loss_rise": jnp.where(known, seen.loss_rise, jnp.nan)}

    def _step(self, state: State, batch: PyTree, step_key: jax.Array, data: PyTree) -> Step:
        batch, dropout = self._augmented(jax.random.fold_in(step_key, 1), batch), _dropout(step_key)

        def losses_fn(params: optax.Params, some: PyTree) -> jax.Array:
            variables = {"params": params, **state.rest}
            return measures.losses(self._task, variables, some, True, dropout)[0]

        def loss(params: optax.Params, *group: jax.Array) -> tuple[jax.Array, PyTree]:
            return self._loss(state, batch, dropout, params, *group)

        value_and_grad_fn = jax.value_and_grad(loss, has_aux=True)

        def last(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(state.opt_state.step == 0, new, old)

        previous = jax.tree.map(last, self._kept(batch), state.previous)
        return Step(losses_fn, value_and_grad_fn, state.params, batch, step_key, data, previous)

    def _kept(self, batch: PyTree) -> PyTree:
        return batch if self._variant.method.needs_previous else ()

    def _loss(
        self, state: State, batch: PyTree, key: jax.Array, params: optax.Params, *group: jax.Array
    ) -> tuple[jax.Array, PyTree]:
        """The mean loss of a batch, or of one of its groups, and the other variables after it.

        With several groups, each is normalized by its own statistics, and the running statistics
        are averaged. Both passes of a step draw the same dropout from ``key``.
        """
        if group:
            batch, key = _group(batch, self._recipe.groups, *group), jax.random.fold_in(key, *group)
        variables = {"params": params, **state.rest}
        losses, rest = measures.losses(self._task, variables, batch, True, key)
        return jnp.mean(losses), rest

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
        y = augmentation.smooth(y, dataset.classes, recipe.label_smoothing)
        return augmentation.mixup(keys[3], x, y, recipe.mixup)


def _dropout(step_key: jax.Array) -> jax.Array:
    return jax.random.fold_in(step_key, 2)


def _group(batch: PyTree, groups: int, i: jax.Array) -> PyTree:
    """One of equal parts of a batch: every ``groups``-th example, from the i-th on.

    If the batch is split over devices, this is an equal share of each device's part, and the same
    examples for any number of devices that divides the size of a group.
    """
    return jax.tree.map(lambda leaf: leaf.reshape(-1, groups, *leaf.shape[1:])[:, i], batch)
