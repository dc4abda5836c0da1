"""A training that stops and goes on in a new one: every number and every bit as if it had not."""

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from sam_optax.experiments import checkpoint_file, data, models, task, training
from sam_optax.experiments.checkpoints import Checkpoints
from sam_optax.experiments.family import METHODS

pytestmark = pytest.mark.slow

EPOCHS = 4
IDENTITY = {"settings": {}, "hyperparameters": {}, "data": ""}
CHOSEN = {name: METHODS[name].variant() for name in ("rsam", "fsam")}
ROUNDS = 2
"""Of the reference, which is not compared: fewer than the epochs."""


class Stop(Exception):
    pass


class Listener:
    """Counts the pieces, and stops after the checkpoint of an epoch."""

    def __init__(self, stop_at=None):
        self.stop_at, self.counts, self.before = stop_at, {}, {}

    def compiling(self, what, number, count):
        pass

    def resumed(self, pieces):
        self.before = dict(pieces)
        self.counts = dict(pieces)

    def done(self, kind, seconds):
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if kind == "checkpoint" and self.counts[kind] == self.stop_at:
            raise Stop


@pytest.fixture(scope="module", autouse=True)
def _few_rounds_and_quick_compilation(tmp_path_factory):
    """All trainings here compile the same programs."""
    options = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("cache")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}

    def configure(values):
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()

    configure(options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "REFERENCE_ROUNDS", ROUNDS)
        yield
    configure(before)


@pytest.fixture(scope="module")
def small_task(archive):
    dataset = data.load(f"npz:{archive}")
    return task.Task(
        dataset=dataset,
        model=models.MLP(classes=dataset.classes, width=8),
        seeds=(3, 4),
        epochs=EPOCHS,
        batch_size=12,
        label_noise=0.25,
        base={"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
        sharpness_rho=0.3,
    )


def train(small_task, listener, checkpoints=None):
    return training.train(small_task, CHOSEN, listener, checkpoints)


def found(out, every=1):
    checkpoints = Checkpoints(out, every, IDENTITY)
    assert checkpoints.find() is None
    return checkpoints


def seconds_of(out):
    run, _ = checkpoint_file.decode((out / "checkpoint.msgpack").read_bytes())
    return {name: record["seconds"] for name, record in run["record"].items()}


def test_stopping_and_going_on_changes_no_bit(small_task, tmp_path):
    straight = train(small_task, Listener())
    seconds = {}
    for stop in (1, 3, EPOCHS):
        listener = Listener(stop)
        with pytest.raises(Stop):
            train(small_task, listener, found(tmp_path))
        before, seconds = seconds, seconds_of(tmp_path)
        assert found(tmp_path).epoch == stop
        assert {name: len(each) for name, each in seconds.items()} == {
            "rsam": stop,
            "fsam": stop,
            "sgd": min(stop, ROUNDS),
        }
        for name, earlier in before.items():  # what was measured before counts
            assert seconds[name][: len(earlier)] == earlier
    outcomes = train(small_task, listener := Listener(), found(tmp_path))
    assert listener.before == training.work_of_epochs(EPOCHS, small_task, CHOSEN, 1)
    announced = training.work(small_task, CHOSEN, 1)
    assert listener.counts == {kind: count for kind, (_, count) in announced.items()}
    for name, outcome in outcomes.items():
        jax.tree.map(np.testing.assert_array_equal, outcome.params, straight[name].params)
        for key in ("train_loss", "test_accuracy", "sharpness"):
            ours, theirs = getattr(outcome, key), getattr(straight[name], key)
            np.testing.assert_array_equal(ours, theirs, strict=True)
        assert outcome.seconds == seconds[name]
        assert outcome.cost == training.relative_cost(seconds[name], seconds["sgd"])


def test_checkpoints_are_as_far_apart_as_was_asked(small_task, tmp_path):
    checkpoints = Checkpoints(tmp_path, 3, IDENTITY)
    train(small_task, listener := Listener(), checkpoints)
    assert checkpoints.epoch == 3
    assert (
        listener.counts["checkpoint"] == 1 == training.work(small_task, CHOSEN, 3)["checkpoint"][1]
    )
    listener = Listener()
    train(small_task, listener, found(tmp_path, every=0))
    assert listener.before == {"rsam": 3, "fsam": 3, "sgd for reference": ROUNDS}
    assert listener.counts == {"rsam": 4, "fsam": 4, "sgd for reference": ROUNDS, "sharpness": 2}
    assert found(tmp_path).epoch == 3
