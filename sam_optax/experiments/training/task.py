"""What is trained: the task, the methods with their recipes, and every random draw of a seed."""

import dataclasses
from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from sam_optax.experiments.data.dataset import Dataset
from sam_optax.experiments.data.labels import corrupt
from sam_optax.experiments.methods.method import Base, Variant
from sam_optax.experiments.training import feed


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a method is trained.

    Attributes:
      epochs: passes over the training set.
      batch_size: examples in a step; what is left over at the end of an epoch stays unused in it.
      m: examples that share one perturbation, a divisor of the batch size.
      optimizer: ``"sgd"`` or ``"adamw"``.
      lr: learning rate after the warm-up.
      schedule: what follows it, ``"cosine"`` or ``"constant"``.
      warmup_steps: steps in which the learning rate rises from 0.
      momentum: of sgd; β₁ of adamw.
      nesterov: whether momentum is Nesterov's.
      weight_decay: added to the gradient (sgd) or decoupled (adamw).
      clip: largest norm of the sharp gradient; 0 for any.
      label_smoothing: share of the label that all classes get.
      crop: pixels of padding before the random crop.
      flip: whether half of the images are mirrored.
      cutout: side of the square that is cut out.
      mixup: α of mixup.
    """

    epochs: int
    batch_size: int
    m: int
    optimizer: str
    lr: float
    schedule: str
    warmup_steps: int
    momentum: float
    nesterov: bool
    weight_decay: float
    clip: float
    label_smoothing: float
    crop: int
    flip: bool
    cutout: int
    mixup: float

    @property
    def groups(self) -> int:
        """Equal parts of a batch, each with a perturbation of its own."""
        return self.batch_size // self.m

    def base(self, steps: int) -> Base:
        """The base optimizer; clipping acts on the gradient that the update is made of."""
        rest: optax.Schedule = optax.constant_schedule(self.lr)
        if self.schedule == "cosine":
            rest = optax.cosine_decay_schedule(self.lr, max(1, steps - self.warmup_steps))
        rate = rest
        if self.warmup_steps:
            rise = optax.linear_schedule(0.0, self.lr, self.warmup_steps)
            rate = optax.join_schedules([rise, rest], [self.warmup_steps])
        pieces = [optax.clip_by_global_norm(self.clip)] if self.clip else []
        if self.optimizer == "adamw":
            pieces.append(optax.adamw(rate, b1=self.momentum, weight_decay=self.weight_decay))
        else:
            pieces.append(optax.add_decayed_weights(self.weight_decay))
            sgd = optax.sgd(rate, momentum=self.momentum or None, nesterov=self.nesterov)
            pieces.append(sgd)
        return Base(optax.chain(*pieces), rate, groups=self.groups if self.groups > 1 else None)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A method of a run: which, with what, and how it is trained."""

    method: str
    variant: Variant
    recipe: Recipe


@dataclasses.dataclass(frozen=True)
class Task:
    """What all methods of a run are trained on.

    Attributes:
      dataset: the examples, with clean labels.
      model: the network.
      seeds: each has its own initialization, label noise, order of examples and R-SAM key, which
        are the same for all methods.
      label_noise: share of the training labels that is corrupted.
      sharpness_rho: radius at which sharpness is measured, for all methods.
      entries: what is trained, by name.
    """

    dataset: Dataset
    model: nn.Module
    seeds: tuple[int, ...]
    label_noise: float
    sharpness_rho: float
    entries: Mapping[str, Entry]

    def steps_per_epoch(self, recipe: Recipe) -> int:
        """Training steps in an epoch."""
        return len(self.dataset.train.y) // recipe.batch_size

    def base(self, recipe: Recipe) -> Base:
        """The base optimizer of a recipe."""
        return recipe.base(recipe.epochs * self.steps_per_epoch(recipe))


def noisy_labels(task: Task, seeds: tuple[int, ...]) -> np.ndarray:
    """The labels that each seed trains on, (seeds, examples)."""
    y, classes = task.dataset.train.y, task.dataset.classes
    rngs = [np.random.default_rng([seed, 0]) for seed in seeds]
    return np.stack([corrupt(y, task.label_noise, classes, rng) for rng in rngs])


def batch_indices(task: Task, recipe: Recipe, seeds: tuple[int, ...], epoch: int) -> np.ndarray:
    """The examples of each step of an epoch, (seeds, steps, batch_size)."""
    n = len(task.dataset.train.y)
    return np.stack([feed.order(n, recipe.batch_size, seed, epoch) for seed in seeds])


def keys(seeds: tuple[int, ...], purpose: int) -> jax.Array:
    """One PRNG key for each seed.

    Purpose 0 is the initialization, 1 the method's own randomness, 2 + i what the steps of epoch i
    draw outside of it.
    """
    return jnp.stack([jax.random.fold_in(jax.random.key(seed), purpose) for seed in seeds])
