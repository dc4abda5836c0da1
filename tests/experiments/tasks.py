"""Small tasks and trainings that several tests share."""

import dataclasses
import runpy
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from sam_optax.experiments.data.examples import Dataset, Examples
from sam_optax.experiments.methods.method import Method
from sam_optax.experiments.methods.registry import METHODS
from sam_optax.experiments.options.describe import describe
from sam_optax.experiments.options.options import Compare
from sam_optax.experiments.options.resolve import resolve
from sam_optax.experiments.training import devices
from sam_optax.experiments.training.runner import MethodStep
from sam_optax.experiments.training.task import task_of
from sam_optax.experiments.training.train import Training

FILE = Path(__file__).parents[2] / "notebooks" / "methods.py"
NETWORKS = FILE.with_name("networks.py")
OF_FILE = {
    name: f"{FILE}:{name}"
    for name, of in runpy.run_path(str(FILE)).items()
    if isinstance(of, Method)
}
NAMES = {**{name: name for name in METHODS}, **OF_FILE}
"""What names each method, built in or of the notebooks' file, by its short name."""


class Flat(nn.Module):
    """BatchNorm, if it is wanted, and two dense layers, which compile fast."""

    classes: int = 3
    norm: bool = True
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, *, train):
        x = x.reshape(len(x), -1).astype(self.dtype)
        x = nn.Dense(8, dtype=self.dtype)(x)
        if self.norm:
            x = nn.BatchNorm(not train, momentum=0.9, dtype=self.dtype)(x)
        return nn.Dense(self.classes)(nn.tanh(x).astype(jnp.float32))


def images():
    """48 and 21 images of 8×8 in three classes that differ in brightness."""
    rng = np.random.default_rng(0)

    def split(n):
        labels = np.arange(n, dtype=np.int32) % 3
        noise = rng.normal(0, 20, (n, 8, 8, 3))
        bright = np.clip(noise + 40 + 80 * labels[:, None, None, None], 0, 255).astype(np.uint8)
        return Examples(bright, labels)

    mean, std = np.full(3, 0.5, np.float32), np.full(3, 0.25, np.float32)
    return Dataset("images", split(48), split(21), 3, mean, std, "")


def make(dataset, *methods, model=None, count=1, hyperparameters=None, **options):
    """A task as the command would make it, of a network that compiles fast unless one is named."""
    options = {"batch_size": 16, "epochs": 2, "seeds": 1, "label_noise": 0.0, **options}
    options = {"weight_decay": 5e-4, **options}  # of all methods
    if isinstance(model, str):
        options["model"] = model
    names = tuple(NAMES[name] for name in methods)
    given = Compare(methods=names, hyperparameters=hyperparameters or {}, **options)
    description = describe(given, resolve(given), dataset, count)
    task = task_of(description, dataset)
    if isinstance(model, str):
        return task
    return dataclasses.replace(task, model=model or Flat())


class Silent:
    """In the place of the progress display: it counts.

    Attributes:
      pieces: of work, by kind.
    """

    def __init__(self):
        self.pieces = {}

    def show(self, doing):
        assert "\n" not in doing

    def done(self, kind, share=1.0):
        assert share > 0
        self.pieces[kind] = self.pieces.get(kind, 0) + share


def run(task, count=1, listener=None, checkpoints=None):
    """What becomes of each method."""
    return Training(task, devices.choose(count)).run(listener or Silent(), checkpoints)


def begin(task, name, seed=0):
    """A method's step and its first state, of one seed: ``(step, state, key)``."""
    entry, key = task.entries[name], jax.random.fold_in(jax.random.key(seed), 1)

    def first():
        variables = task.model.init(jax.random.key(seed), task.example, train=False)
        return MethodStep(task, entry, key).init(variables)

    def step(key, state, batch, step_key, data):
        return MethodStep(task, entry, key, data).take(state, batch, step_key)

    return step, first, key
