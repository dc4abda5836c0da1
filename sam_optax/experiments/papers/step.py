"""The training step and the evaluation step, under ``jit`` with the batch split over devices."""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from sam_optax.experiments.papers import augment
from sam_optax.experiments.papers.images import ImageDataset
from sam_optax.experiments.papers.settings import Settings
from sam_optax.training import TrainState


class State(TrainState):
    """A training between two steps.

    Attributes:
      batch_stats: BatchNorm's running statistics; empty without BatchNorm.
    """

    batch_stats: Any


class Problem(NamedTuple):
    """What is trained, as the steps need it.

    Attributes:
      model: the network.
      settings: of augmentation and labels.
      dataset: for the number of classes and what images are normalized by.
    """

    model: nn.Module
    settings: Settings
    dataset: ImageDataset


def init(
    problem: Problem, tx: optax.GradientTransformation, seed: int, size: int
) -> Callable[[], State]:
    """Makes the state before the first step."""

    def make() -> State:
        image = jnp.zeros((1, size, size, 3))
        variables = problem.model.init(
            jax.random.fold_in(jax.random.key(seed), 0), image, train=False
        )
        state = State.create(
            apply_fn=problem.model.apply,
            params=variables["params"],
            tx=tx,
            batch_stats=variables.get("batch_stats", {}),
        )
        return state.replace(step=jnp.zeros((), jnp.int32))

    return make


def augmented(
    problem: Problem, key: jax.Array, images: jax.Array, labels: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Images of a training step as the network sees them, and their distributions of labels."""
    settings, dataset = problem.settings, problem.dataset
    keys = jax.random.split(key, 4)
    images = augment.crop(keys[0], images, settings["crop"])
    if settings["flip"]:
        images = augment.flip(keys[1], images)
    x = augment.normalize(images, dataset.mean, dataset.std)
    x = augment.cutout(keys[2], x, settings["cutout"])
    y = augment.smooth(labels, dataset.classes, settings["label_smoothing"])
    return augment.mixup(keys[3], x, y, settings["mixup"])


def group_of(batch: Any, groups: int, i: chex.Numeric) -> Any:
    """One of equal parts of a batch: every ``groups``-th example, from the i-th on.

    With the batch split over devices, that is an equal share of what each of them has, and the same
    examples on any number of devices that divides the size of a group.
    """

    def part(leaf: jax.Array) -> jax.Array:
        return leaf.reshape(-1, groups, *leaf.shape[1:])[:, i]

    return jax.tree.map(part, batch)


def train_step(
    problem: Problem, seed: int, groups: int
) -> Callable[..., tuple[State, dict[str, jax.Array]]]:
    """The step: ``(state, images, labels) -> (state, metrics)``.

    Statistics and metrics are those of the first pass, both passes see the same augmentation, and
    its randomness follows from the seed and the number of the step. With several groups, as many as
    the optimizer has, each is normalized by its own statistics (BatchNorm), and running statistics
    and metrics are means over the groups.
    """

    def step(
        state: State, images: jax.Array, labels: jax.Array
    ) -> tuple[State, dict[str, jax.Array]]:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 2), state.step)
        x, y = augmented(problem, key, images, labels)

        def loss_fn(params: Any, *group: chex.Numeric) -> tuple[jax.Array, Any]:
            batch = x, y, labels
            inputs, targets, classes = group_of(batch, groups, *group) if group else batch
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, new = state.apply_fn(variables, inputs, train=True, mutable=["batch_stats"])
            loss = jnp.mean(optax.softmax_cross_entropy(logits, targets))
            return loss, (new.get("batch_stats", {}), jnp.mean(jnp.argmax(logits, -1) == classes))

        state, (loss, (batch_stats, accuracy)) = state.apply_loss(loss_fn, has_aux=True)
        metrics = {"train_loss": loss, "train_accuracy": accuracy}
        return state.replace(batch_stats=batch_stats), metrics

    return step


def eval_step(problem: Problem) -> Callable[..., dict[str, jax.Array]]:
    """Sums over a batch: ``(params, batch_stats, images, labels, weight) -> metrics``.

    The weight is 1 for an example and 0 for filling.
    """

    def step(
        params: Any, batch_stats: Any, images: jax.Array, labels: jax.Array, weight: jax.Array
    ) -> dict[str, jax.Array]:
        x = augment.normalize(images, problem.dataset.mean, problem.dataset.std)
        variables = {"params": params, "batch_stats": batch_stats}
        logits = jnp.asarray(problem.model.apply(variables, x, train=False))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return {
            "loss": jnp.sum(weight * losses),
            "correct": jnp.sum(weight * (jnp.argmax(logits, -1) == labels)),
        }

    return step
