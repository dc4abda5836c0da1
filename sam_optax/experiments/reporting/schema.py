"""The schema of ``results.json``: what each number is, and what a reader relies on."""

from typing import Annotated, Any

import msgspec

UNITS = {
    "tuned_test_accuracy": "test accuracy after the epoch that --tune chose on held-out examples",
    "held_out": "score on the held-out examples, with labels as trained on, by seed",
    "best_test_accuracy": "the best after an epoch, chosen on the test examples: optimistic",
    "interval": "half the width of a mean's 95 % confidence interval, Student's t",
    "differences": "to sgd, and to the sam with the best mean score, seed by seed",
    "train_loss": "mean over the training set, on the labels trained on; nats, or of your loss",
    "sharpness": "L(w + eps) - L(w) on training examples, eps of SAM at sharpness_rho",
    "gradients": "gradients on a batch per step",
    "step_cost": "time of a training step relative to SGD, median over interleaved epochs",
    "epoch_seconds": "seconds, training steps of one epoch of all seeds, median",
    "compile_seconds": "seconds to compile the training step",
    "examples_per_second": "training examples per second, of all seeds",
}
"""Besides the score after the last epoch, see ``words.Score``."""


class _Seed(msgspec.Struct):
    seed: int
    diverged: bool
    curves: dict[str, list[float | None]]


class _Method(msgspec.Struct):
    name: str
    method: str
    epochs: int
    batch_size: int
    steps_per_epoch: int
    hyperparameters: dict[str, Any]
    seeds: list[_Seed]
    summary: dict[str, dict[str, float | None]]
    title: str = ""
    diverged: int = 0
    sources: dict[str, str] = {}
    settings: dict[str, dict[str, Any]] = {}
    differences: dict[str, dict[str, Any]] = {}
    gradients: float | None = None
    step_cost: float | None = None
    epoch_seconds: float | None = None
    compile_seconds: float | None = None
    examples_per_second: float | None = None


class _Dataset(msgspec.Struct):
    name: str
    train_examples: int
    test_examples: int
    classes: int
    sha256: str


class Results(msgspec.Struct):
    """The fields that readers use; those with a default may be missing in older files."""

    settings: dict[str, dict[str, Any]]
    dataset: _Dataset
    seeds: Annotated[list[int], msgspec.Meta(min_length=1)]
    methods: Annotated[list[_Method], msgspec.Meta(min_length=1)]
    metric: dict[str, Any] = {}
    parameters: int = 0
    notes: list[str] = []
    versions: dict[str, str] = {}
