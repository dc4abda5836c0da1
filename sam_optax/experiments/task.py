"""What the methods of a comparison share: the task, and every random draw of a seed."""

import dataclasses
from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from sam_optax.experiments import data
from sam_optax.experiments.data import Dataset


@dataclasses.dataclass(frozen=True)
class Task:
    """What every method is trained on, and how.

    Attributes:
      dataset: the examples, with clean labels.
      model: the network.
      seeds: each has its own initialization, label noise, order of examples and R-SAM key, which
        are the same for all methods.
      epochs: passes over the training set.
      batch_size: examples in a step; what is left over at the end of an epoch stays unused in it.
      label_noise: share of the training labels that is corrupted.
      base: hyperparameters of the base optimizer.
      sharpness_rho: radius at which sharpness is measured, for all methods.
    """

    dataset: Dataset
    model: nn.Module
    seeds: tuple[int, ...]
    epochs: int
    batch_size: int
    label_noise: float
    base: Mapping[str, float]
    sharpness_rho: float

    @property
    def steps_per_epoch(self) -> int:
        """Training steps in an epoch."""
        return len(self.dataset.x_train) // self.batch_size


def corrupted_labels(task: Task) -> np.ndarray:
    """The labels that each seed trains on, (seeds, examples)."""
    y, classes = task.dataset.y_train, task.dataset.classes
    rngs = [np.random.default_rng([seed, 0]) for seed in task.seeds]
    return np.stack([data.corrupt(y, task.label_noise, classes, rng) for rng in rngs])


def batch_indices(task: Task, epoch: int) -> np.ndarray:
    """The examples of each step of an epoch, (seeds, steps, batch_size)."""
    n, steps = len(task.dataset.x_train), task.steps_per_epoch
    rngs = [np.random.default_rng([seed, 1, epoch]) for seed in task.seeds]
    orders = [rng.permutation(n)[: steps * task.batch_size] for rng in rngs]
    return np.stack(orders).reshape(-1, steps, task.batch_size).astype(np.int32)


def keys(task: Task, purpose: int) -> jax.Array:
    """One PRNG key a seed.

    Purpose 0 is the initialization, 1 the method's own randomness, 2 + i what the steps of epoch i
    draw outside of it.
    """
    return jnp.stack([jax.random.fold_in(jax.random.key(seed), purpose) for seed in task.seeds])
