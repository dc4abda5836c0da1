# ruff: noqa: RUF009 (functions declare the fields)
"""The options of ``compare``."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from sam_optax.experiments.methods import registry
from sam_optax.experiments.options.declare import (
    COUNT,
    COUNT_OR_ZERO,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    check,
    check_once,
    choice,
    one_of,
    option,
    setting,
)
from sam_optax.experiments.options.presets import PRESETS, Preset

_METHODS = " ".join(registry.DEFAULT)
_PRESETS = "; ".join(f"{name}: {preset.title}" for name, preset in PRESETS.items())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compare:
    """Trains SGD and sharpness-aware methods on the same data and compares them in a table.

    All methods share the initializations, the label noise and the order of examples. On digits and
    mnist5k 40 % of the training labels are wrong by default: there the methods differ most.
    """

    # The options of the short help.
    BASIC: ClassVar[str] = (
        "methods dataset model tune seeds epochs batch_size lr weight_decay optimizer label_noise "
        "preset out checkpoint_every resume dry_run"
    )
    methods: tuple[str, ...] | None = option(
        None, f"Methods by name, or FILE.py:NAME (default: {_METHODS}).", registry.rule, "METHOD"
    )
    dataset: str | None = setting(
        "digits",
        "digits, mnist5k, npz:PATH or hf:NAME_OR_PATH. npz: your archive with x_train, y_train, "
        "x_test and y_test: vectors (n, features) or images (n, height, width[, channels]), and "
        "integer labels from 0. hf: a data set of the Hugging Face library, by name, or a folder: "
        'saved to disk, parquet or images; needs pip install "sam_optax[hf]".',
        metavar="DATA",
    )
    model: str | None = setting(
        "mlp",
        "The network: FILE.py:NAME for yours, mlp (two hidden layers of 256 units) or cnn (two "
        "convolutions of 16 and 32 channels). Yours, also as package.module:NAME, is a Flax Linen "
        "module, the class of a Linen or NNX module, or a function that returns one (of NNX with "
        "the parameter rngs; a parameter classes gets their number), or a pair of these and the "
        "variables to start from. Those of the papers are in notebooks/networks.py.",
        metavar="MODEL",
    )
    tune: bool = option(False, "First choose radius and weight decay on held-out examples.")
    tune_lr: bool = option(False, "Also choose the learning rate of every method.", needs="tune")
    trials: int | None = option(
        None, "Trials per method (default: 17, with --tune-lr 40).", COUNT, needs="tune"
    )
    seeds: int = option(5, "Runs per method, of different initialization, noise and order.", COUNT)
    seed_offset: int = option(0, "The first seed.", COUNT_OR_ZERO)
    epochs: int | None = setting(60, "Number of passes over the training set.", COUNT)
    batch_size: int | None = setting(100, "Examples per step, over all devices.", COUNT)
    lr: float | None = setting(0.1, "Learning rate after the warm-up.", POSITIVE)
    weight_decay: float | None = setting(5e-4, "Weight decay (default: by method).", NOT_NEGATIVE)
    optimizer: str | None = setting(
        "sgd",
        "The base optimizer; the decay of all but adamw is added to the gradient.",
        **choice("sgd", "rmsprop", "adam", "adamw"),
    )
    schedule: str | None = setting(
        "cosine", "Learning-rate schedule; cosine ends at 0.", **choice("cosine", "constant")
    )
    warmup_steps: int | None = setting(0, "Steps in which the rate rises from 0.", COUNT_OR_ZERO)
    momentum: float | None = setting(0.9, "Momentum of sgd and rmsprop; β₁ of adam(w).", SHARE)
    beta2: float | None = setting(0.999, "β₂ of adam and adamw.", SHARE)
    nesterov: bool | None = setting(False, "Whether to use Nesterov momentum.")
    clip: float | None = setting(0.0, "Norm to clip the sharp gradient to, if not 0.", NOT_NEGATIVE)
    m: int | None = setting(
        None, "Examples that share a perturbation (default: the whole batch).", COUNT
    )
    label_noise: float | None = setting(
        0.4, "Share of the training labels to make wrong (default: 0.4, of your data 0).", SHARE
    )
    label_smoothing: float | None = setting(0.0, "Share of a label spread over all classes.", SHARE)
    crop: int | None = setting(0, "Pixels of padding before the random crop.", COUNT_OR_ZERO)
    flip: bool | None = setting(False, "Whether to flip half of the images horizontally.")
    cutout: int | None = setting(0, "Side of the cutout square in pixels, if not 0.", COUNT_OR_ZERO)
    mixup: float | None = setting(0.0, "α of mixup, if not 0.", NOT_NEGATIVE)
    image_column: str | None = option(None, "With hf: the column of images.")
    label_column: str | None = option(None, "With hf: the column of labels.")
    test_split: str | None = option(None, "With hf: the split to test on.")
    image_size: int | None = setting(
        None, "With hf: side in pixels of the squares that images are resized to.", COUNT
    )
    preset: str | None = option(
        None,
        f"The setting of a paper, such as asam-cifar10 (--help-all lists them). {_PRESETS}.",
        one_of(PRESETS),
    )
    sharpness_rho: float | None = setting(0.5, "Radius ρ of the measured sharpness.", POSITIVE)
    devices: int | None = option(
        None, "Devices that share a batch (default: one, or all with a preset).", COUNT
    )
    out: Path | None = option(
        None, "Directory for results, trained params, report.html and its figures.", metavar="DIR"
    )
    checkpoint_every: int = option(
        0,
        "Write a checkpoint into --out every N epochs, for --resume.",
        COUNT_OR_ZERO,
        "N",
        needs="out",
    )
    resume: bool = option(
        False,
        "Continue the run in --out, or print its table. It goes on from the checkpoint, or else "
        "from the beginning, with the same options (except --out, --checkpoint-every and the path "
        "of the data).",
        needs="out",
    )
    dry_run: bool = option(False, "Print what would be trained, with the source of each value.")
    # The values to train with, such as {"sam.rho": (0.1, 0.2)}.
    hyperparameters: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)

    @property
    def table(self) -> Preset | None:
        """The table of a paper that is asked for."""
        return PRESETS[self.preset] if self.preset else None

    def __post_init__(self) -> None:
        """Raises :class:`UserError` for a value out of range, before anything is loaded."""
        check(self)
        for name, values in {"methods": self.methods, **self.hyperparameters}.items():
            check_once(name, values)


DEFAULTS = {
    field.name: field.metadata["otherwise"]
    for field in dataclasses.fields(Compare)
    if "otherwise" in field.metadata
}
"""The settings that a preset may set, with their values without a preset."""
UNMENTIONED = {**DEFAULTS, "weight_decay": 0.0, "label_noise": 0.0, "sharpness_rho": 0.05}
"""Their values if a preset does not mention them: those of data and labels have no effect."""
