# ruff: noqa: RUF001, RUF009 (the papers' Greek letters, in help texts; functions declare fields)
"""The options of ``analyze``."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from sam_optax.experiments.errors import UserError
from sam_optax.experiments.options.declare import (
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    Allowed,
    at_least,
    check,
    declared,
    flag,
    one_of,
    option,
)
from sam_optax.experiments.reporting.words import plain

MEASURES = ("sharpness", "adaptive_sharpness", "eigenvalues", "stability", "slices")
_OF_STABILITY = ("gamma", "noise_scale", "draws")


@dataclasses.dataclass(frozen=True)
@declared
class Analyze:
    """Measures the sharpness of the networks that compare --out or train --out has trained.

    Reports sharpness, adaptive sharpness and the largest eigenvalues of the Hessian on the
    training set (at most 10,000 examples) with the labels used in training, of all networks that
    --save-every has kept, over epochs. Draws slices of the loss through networks of the first
    seed, all on one scale.
    """

    run_dirs: Annotated[
        tuple[Path, ...],
        tyro.conf.Positional,
        tyro.conf.arg(help="Directories of --out of finished runs.", metavar="RUN_DIR ..."),
    ]
    out: Path | None = option(metavar="DIR")
    """Directory for the files. Default: the directory of the run, if there is one run."""
    measures: tuple[str, ...] = option(
        ("sharpness", "adaptive_sharpness", "eigenvalues", "slices"),
        one_of(MEASURES),
        metavar="MEASURE ...",
        help=f"What to measure or draw, any of {', '.join(MEASURES)} (of the gradient along the "
        "ascent, with BatchNorm as in training).",
    )
    rho: tuple[float, ...] = option((0.5,), POSITIVE)
    """Radii ρ of sharpness, in units of the weights; stability is measured up to the largest."""
    adaptive_rho: tuple[float, ...] = option((1.0,), POSITIVE)
    """Radii ρ of adaptive sharpness, relative to the weights."""
    p: tuple[float, ...] = option((2.0,), Allowed(lambda p: p >= 1, "use at least 1, or inf"))
    """Norms p of the balls of both, such as 2 or inf."""
    m: int | None = option(None, COUNT, metavar="INT")
    """Examples per group of m-sharpness, for both. Default: all examples are one group."""
    steps: int = option(20, COUNT)
    """Ascent steps of the sharpness measures, from each of three starts."""
    lanczos_steps: int = option(40, at_least(5))
    """Steps of each Lanczos run for the eigenvalues."""
    gamma: tuple[float, ...] = option((0.0, 0.0866, 0.1, 0.1118), NOT_NEGATIVE)
    """Noise γ of the random starts of stability; by default, γ² is that of R-SAM's figures."""
    noise_scale: str = option(
        "isotropic",
        one_of(("isotropic", "relative", "sqrt_norm", "norm")),
        help="How the noise scales with a kernel: isotropic as in the text of R-SAM, or as in "
        "sam_optax.rsam, whose default is relative.",
    )
    draws: int = option(4, COUNT)
    """Random starts per γ and network."""
    seeds: int | None = option(None, COUNT)
    """Number of seeds to measure, from the first. Default: all seeds of the runs."""

    def __post_init__(self) -> None:
        """Raises :class:`UserError` for a value out of range, before anything is loaded."""
        check(self)
        fields = {field.name: field for field in dataclasses.fields(self)}
        for name in _OF_STABILITY if "stability" not in self.measures else ():
            if (value := getattr(self, name)) != fields[name].default:
                raise UserError(
                    f"{flag(name)} {plain(value)}: is of stability, which is not measured; add it "
                    "to --measures, or leave the option out."
                )
        if len(self.run_dirs) > 1 and self.out is None:
            raise UserError("RUN_DIR: there are several; give --out DIR for the files.")
