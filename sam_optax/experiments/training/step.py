"""The training step of one seed: ``(state, batch) -> state``, and a look at one in numbers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sam_optax.experiments.methods.method import Step
from sam_optax.experiments.networks import augmentation
from sam_optax.experiments.training import measures
from sam_optax.experiments.training.task import Entry, Recipe, Task


class State(NamedTuple):
    """A training between two steps; without BatchNorm ``batch_stats`` is empty."""

    params: Any
    opt_state: Any
    batch_stats: Any


def init(task: Task, entry: Entry, key: jax.Array, variables: Any) -> State:
    """The state before the first step, given the network's initial variables."""
    tx = entry.variant.transformation(task.base(entry.recipe), key)
    params = variables["params"]
    return State(params, tx.init(params), variables.get("batch_stats", {}))


def train_step(task: Task, entry: Entry) -> Callable[..., State]:
    """The step: ``(key, state, batch, step_key, data) -> state``.

    BatchNorm's statistics are those of the first pass, or of one more pass at the params where a
    method has gradients of its own.
    """

    def step(key: jax.Array, state: State, batch: Any, step_key: jax.Array, data: Any) -> State:
        tx = entry.variant.transformation(task.base(entry.recipe), key)
        this = _step(task, entry, state, batch, step_key, data)
        params, opt_state, first = entry.variant.update(tx, state.opt_state, this)
        if first is None and state.batch_stats:
            first = _loss(task, entry.recipe, state, this.batch, state.params)
        return State(params, opt_state, state.batch_stats if first is None else first[1])

    return step


def look(task: Task, entry: Entry) -> Callable[..., dict[str, jax.Array]]:
    """A step in numbers, not taken: ``(key, state, batch, step_key, data) -> numbers by name``.

    They are those of :class:`sam_optax.StepInfo`; a rise of the loss that is not known is NaN.
    Empty for the base optimizer.
    """

    def numbers(
        key: jax.Array, state: State, batch: Any, step_key: jax.Array, data: Any
    ) -> dict[str, jax.Array]:
        this = _step(task, entry, state, batch, step_key, data)
        seen = entry.variant.look(task.base(entry.recipe), key, state.opt_state, this)
        if seen is None:
            return {}
        found = seen._asdict()
        known = found.pop("loss_known")
        return {**found, "loss_rise": jnp.where(known, seen.loss_rise, jnp.nan)}

    return numbers


def _step(
    task: Task, entry: Entry, state: State, batch: Any, step_key: jax.Array, data: Any
) -> Step:
    recipe = entry.recipe
    batch = _augmented(task, recipe, jax.random.fold_in(step_key, 1), batch)

    def losses_fn(params: Any, some: Any) -> jax.Array:
        variables = measures.variables(params, state.batch_stats)
        return measures.losses(task, variables, some, train=True)[0]

    def loss(params: Any, *group: Any) -> tuple[jax.Array, Any]:
        return _loss(task, recipe, state, batch, params, *group)

    value_and_grad_fn = jax.value_and_grad(loss, has_aux=True)
    return Step(losses_fn, value_and_grad_fn, state.params, batch, step_key, data)


def _loss(
    task: Task, recipe: Recipe, state: State, batch: Any, params: Any, *group: Any
) -> tuple[jax.Array, Any]:
    """The mean loss of a batch, or of one of its groups, and the new running statistics.

    With several groups each is normalized by its own statistics, and the running ones are means.
    """
    if group:
        batch = _group(batch, recipe.groups, *group)
    variables = measures.variables(params, state.batch_stats)
    losses, batch_stats = measures.losses(task, variables, batch, train=True)
    return jnp.mean(losses), batch_stats


def _group(batch: Any, groups: int, i: Any) -> Any:
    """One of equal parts of a batch: every ``groups``-th example, from the i-th on.

    With the batch split over devices, that is an equal share of what each of them has, and the same
    examples on any number of devices that divides the size of a group.
    """
    return jax.tree.map(lambda leaf: leaf.reshape(-1, groups, *leaf.shape[1:])[:, i], batch)


def _augmented(task: Task, recipe: Recipe, key: jax.Array, batch: Any) -> Any:
    """Examples as the network sees them, and their labels or distributions of labels."""
    x, y = batch
    keys = jax.random.split(key, 4)
    x = augmentation.crop(keys[0], x, recipe.crop)
    if recipe.flip:
        x = augmentation.flip(keys[1], x)
    x = measures.ready(task.dataset, x)
    x = augmentation.cutout(keys[2], x, recipe.cutout)
    if not (recipe.label_smoothing or recipe.mixup):
        return x, y
    y = augmentation.smooth(y, task.dataset.classes, recipe.label_smoothing)
    return augmentation.mixup(keys[3], x, y, recipe.mixup)
