"""Small data for the experiments' tests."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sam_optax.experiments import comparison
from sam_optax.experiments.training.train import Outcome


@pytest.fixture(scope="session")
def arrays():
    """Three well separated classes: 40 training and 13 test vectors of 6 features."""
    rng = np.random.default_rng(7)
    centres = 2 * rng.normal(size=(3, 6))
    y_train, y_test = np.arange(40) % 3, np.arange(13) % 3
    return {
        "x_train": centres[y_train] + rng.normal(size=(40, 6)),
        "y_train": y_train,
        "x_test": centres[y_test] + rng.normal(size=(13, 6)),
        "y_test": y_test,
    }


@pytest.fixture(scope="session")
def data(arrays):
    """The same as pairs of examples and labels."""
    f32 = lambda name: arrays[name].astype(np.float32)
    return {"train": (f32("x_train"), arrays["y_train"]), "test": (f32("x_test"), arrays["y_test"])}


@pytest.fixture(scope="session")
def archive(arrays, tmp_path_factory):
    """The path of an archive with these data."""
    path = tmp_path_factory.mktemp("data") / "small.npz"
    np.savez(path, **arrays)
    return path


@pytest.fixture(scope="module")
def compile_fast():
    """Programs are tiny and run a few times: optimizing them takes longer than running."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(autouse=True, scope="session")
def _width():
    """Output has the width of a file; readline, which pytest loads, sets that of a terminal."""
    os.environ.pop("COLUMNS", None)
    os.unsetenv("COLUMNS")  # for other processes too


class Trainer:
    """In the place of the trainer: it is done at once, or saves a checkpoint and is interrupted.

    Attributes:
      interrupt_after: epochs, if it is to be interrupted; after 0 there is no checkpoint.
      began_at: the epoch at which each run has begun.
    """

    def __init__(self):
        self.interrupt_after, self.began_at = None, []

    def __call__(self, task, *args, **options):
        self.task = task
        return self

    def run(self, progress, checkpoints=None, on_epoch=None):
        self.began_at.append(checkpoints.epoch if checkpoints else 0)
        if self.interrupt_after is not None:
            if self.interrupt_after:
                checkpoints.save(self.interrupt_after, {}, {"w": jnp.ones(3)})
            raise KeyboardInterrupt
        outcomes = {}
        for name, entry in self.task.entries.items():
            curve = np.full((entry.recipe.epochs, len(self.task.seeds)), 0.5, np.float32)
            outcomes[name] = Outcome(
                variables={seed: {"params": {"w": curve[:, 0]}} for seed in self.task.seeds},
                curves={"train_loss": curve, "test_accuracy": curve},
                sharpness=curve[0],
                seconds=[1.0],
                compile_seconds=1.0,
                cost=1.0,
            )
        return outcomes


@pytest.fixture
def trainer(monkeypatch):
    """Commands that train nothing."""
    found = Trainer()
    monkeypatch.setattr(comparison, "Training", found)
    return found
