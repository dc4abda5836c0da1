"""The options of ``compare`` and ``train``."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import tyro

from sam_optax.experiments.errors import UserError
from sam_optax.experiments.methods.registry import DEFAULT, METHODS
from sam_optax.experiments.networks.registry import ARCHITECTURES
from sam_optax.experiments.options.declare import arg, optional, setting
from sam_optax.experiments.options.hyperparameters import Hyperparameters
from sam_optax.experiments.options.presets import PRESETS
from sam_optax.experiments.options.setting import Setting

_NAMES = ", ".join(f"{name} ({method.title})" for name, method in METHODS.items())
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Setting):
    """What ``compare`` and ``train`` have in common."""

    dtype: Annotated[
        str,
        arg(
            "Computation in float32 or bfloat16; params and updates stay float32.",
            "float32|bfloat16",
        ),
    ] = "float32"
    devices: Annotated[
        int | None,
        optional("Local devices that share each batch. Default: one, with a preset all.", "INT"),
    ] = None
    distributed: Annotated[
        Flag,
        arg(
            "Train with other processes, each on its devices and its share of every batch: the "
            "same command on every host. On a TPU pod or under SLURM that is all; elsewhere set "
            "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID."
        ),
    ] = False
    out: Annotated[
        Path | None,
        optional(
            "Directory for results.json, results.csv, params.npz (the trained params), "
            "report.html, its figures, and metrics.jsonl, which grows with each epoch. It is "
            "created if need be; older files of these names are replaced.",
            "DIR",
        ),
    ] = None
    tensorboard: Annotated[
        Flag, arg("Write the metrics for TensorBoard, too, into the directory of --out.")
    ] = False
    checkpoint_every: Annotated[
        int,
        arg(
            "Writes a checkpoint of the whole run into the directory of --out every N epochs, "
            "where --resume finds it; it is removed when the results are there. 0: none.",
            "N",
        ),
    ] = 0
    resume: Annotated[
        Flag,
        arg(
            "Continue the run in the directory of --out from its newest checkpoint, with the same "
            "options (--out, --checkpoint-every and the path of the data may be others). Without a "
            "checkpoint it starts from the beginning; a finished run is only printed."
        ),
    ] = False
    dry_run: Annotated[
        Flag, arg("Print what would be trained, with the source of each value, and stop.")
    ] = False
    hyperparameters: Annotated[Hyperparameters, tyro.conf.arg(name="")] = dataclasses.field(
        default_factory=lambda: Hyperparameters()
    )
    """Hyperparameters of each method. With several values, each is trained."""

    def __post_init__(self) -> None:
        """Raises :class:`UserError` for a value out of range, before anything is loaded."""
        for name, (allowed, what) in _RANGES.items():
            value = getattr(self, name, None)
            if value is not None and not (math.isfinite(value) and allowed(value)):
                raise UserError(f"{flag(name)} {value:g}: use {what}.")
        for name, known in _CHOICES.items():
            if (value := getattr(self, name)) is not None and value not in known:
                raise UserError(f"{flag(name)} {value}: unknown; use one of {', '.join(known)}.")
        if self.out is None:
            for name in ("resume", "checkpoint_every", "tensorboard"):
                if value := getattr(self, name):
                    given = flag(name) + ("" if value is True else f" {value}")
                    raise UserError(f"{given}: needs --out DIR, the directory of the run's files.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compare(Options):
    """Trains SGD and sharpness-aware methods on the same data and prints what each is worth.

    All share the initializations, the label noise and the order of examples. By default 40 % of
    the training labels are wrong, where the methods differ most.
    """

    methods: Annotated[
        tuple[str, ...] | None,
        setting(f"Which to train, some of {_NAMES}.", "METHOD ...", " ".join(DEFAULT)),
    ] = None
    frontier: Annotated[
        Flag,
        arg(
            "Compare what is cheaper than SAM at several radii in place of --methods: accuracy "
            "against the cost of a step, as a table and (with --out) as frontier.png."
        ),
    ] = False
    seeds: Annotated[
        int,
        arg(
            "Runs of each method, each with an initialization, label noise, order of examples and "
            "R-SAM noise of its own."
        ),
    ] = 5
    seed_offset: int = 0
    """The first seed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train(Options):
    """Trains one network by one method: ``compare`` of that method alone, from one seed."""

    method: Annotated[str | None, setting(f"One of {_NAMES}.", "METHOD", "sam")] = None
    seed: int = 0
    """Of the initialization, the order of examples, augmentation, label noise and R-SAM's noise."""

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


def flag(name: str) -> str:
    """The option as on the command line."""
    return "--" + name.replace("_", "-")


_CHOICES: dict[str, tuple[str, ...]] = {
    "preset": tuple(PRESETS),
    "optimizer": ("sgd", "adamw"),
    "schedule": ("cosine", "constant"),
    "dtype": ("float32", "bfloat16"),
    "model": tuple(ARCHITECTURES),
}


def _at_least(least: int) -> tuple[Callable[[float], bool], str]:
    return lambda value: least <= value < 2**31, f"an integer of at least {least}, below 2^31"


_COUNTS = {"epochs": 1, "batch_size": 1, "m": 1, "seeds": 1, "devices": 1, "image_size": 1}
_COUNTS |= {"warmup_steps": 0, "crop": 0, "cutout": 0, "checkpoint_every": 0}
_COUNTS |= {"seed_offset": 0, "seed": 0}
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    **{name: _at_least(least) for name, least in _COUNTS.items()},
    **{
        name: (lambda v: 0 <= v < 1, "a number in [0, 1)")
        for name in ("label_noise", "momentum", "label_smoothing")
    },
    **{name: (lambda v: v > 0, "a number above 0") for name in ("lr", "sharpness_rho")},
    **{
        name: (lambda v: v >= 0, "a number of at least 0")
        for name in ("weight_decay", "clip", "mixup")
    },
    "scale": (lambda v: 0 < v <= 1, "a number in (0, 1]"),
}
