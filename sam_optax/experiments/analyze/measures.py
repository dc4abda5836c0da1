# ruff: noqa: RUF001, RUF009 (the papers' Greek letters, in help texts; functions declare fields)
"""What ``analyze`` measures of a network: its options, and the numbers."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sam_optax import analysis
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.finished import Network
from sam_optax.experiments.options import declare
from sam_optax.experiments.options.declare import COUNT, one_of, option
from sam_optax.experiments.reporting.results import number
from sam_optax.experiments.reporting.words import plain

ADAPTIVE: dict[str, Any] = {"normalization": "elementwise", "eta": 0.0}
"""As ASAM trains, biases not normalized, but for η: not invariant if hidden biases are rescaled."""
MEASURES = ("sharpness", "adaptive_sharpness", "eigenvalues", "stability", "slices")


@dataclasses.dataclass(frozen=True)
class Analyze:
    """Measures the sharpness of the networks that compare --out has trained.

    Reports sharpness, adaptive sharpness and the largest eigenvalues of the Hessian on the
    training set (at most 10,000 examples) with the labels used in training, of all networks that
    --save-every has kept, over epochs. Draws slices of the loss through networks of the first
    seed, all on one scale.
    """

    run_dirs: tuple[Path, ...] = declare.run_dirs()
    out: Path | None = option(
        None, "Directory for the files (default: that of the run, if there is one).", metavar="DIR"
    )
    measures: tuple[str, ...] = option(
        ("sharpness", "adaptive_sharpness", "eigenvalues", "slices"),
        f"What to measure or draw, any of {', '.join(MEASURES)} (of the gradient along the ascent, "
        "with BatchNorm as in training).",
        one_of(MEASURES),
        "MEASURE",
    )
    rho: tuple[float, ...] = option(
        (0.5,),
        "Radii ρ of sharpness, in units of the weights; stability is measured up to the largest.",
        declare.POSITIVE,
    )
    adaptive_rho: tuple[float, ...] = option(
        (1.0,), "Radii ρ of adaptive sharpness, relative to the weights.", declare.POSITIVE
    )
    p: tuple[float, ...] = option(
        (2.0,),
        "Norms p of the balls of both, such as 2 or inf.",
        declare.allowed(lambda p: p >= 1, "use at least 1, or inf"),
    )
    m: int | None = option(
        None,
        "Examples per group of m-sharpness, for both (default: all examples are one group).",
        COUNT,
        "INT",
    )
    steps: int = option(
        20, "Ascent steps of the sharpness measures, from each of three starts.", COUNT
    )
    lanczos_steps: int = option(
        40, "Steps of each Lanczos run for the eigenvalues.", declare.at_least(5)
    )
    gamma: tuple[float, ...] = option(
        (0.0, 0.0866, 0.1, 0.1118),
        "Noise γ of the random starts of stability; by default, γ² is that of R-SAM's figures.",
        declare.NOT_NEGATIVE,
    )
    noise_scale: str = option(
        "isotropic",
        "How the noise scales with a kernel: isotropic as in the text of R-SAM, or as in "
        "sam_optax.rsam, whose default is relative.",
        one_of(("isotropic", "relative", "sqrt_norm", "norm")),
    )
    draws: int = option(4, "Random starts per γ and network.", COUNT)
    seeds: int | None = option(
        None, "Number of seeds to measure, from the first (default: all of the runs).", COUNT, "INT"
    )

    def __post_init__(self) -> None:
        """Raises :class:`UserError` for a value out of range, before anything is loaded."""
        declare.check(self)
        for name in () if "stability" in self.measures else ("gamma", "noise_scale", "draws"):
            if (value := getattr(self, name)) != getattr(Analyze, name):
                raise UserError(
                    f"{declare.flag(name)} {plain(value)}: is of stability, which is not measured; "
                    "add it to --measures, or leave the option out."
                )
        if len(self.run_dirs) > 1 and self.out is None:
            raise UserError("RUN_DIR: there are several; give --out DIR for the files.")

    @property
    def radii(self) -> dict[str, tuple[float, ...]]:
        """The radii of the measures of sharpness that are asked for."""
        every = {"sharpness": self.rho, "adaptive_sharpness": self.adaptive_rho}
        return {name: radii for name, radii in every.items() if name in self.measures}

    @property
    def stability_radii(self) -> list[float]:
        """Ten equal steps up to the largest radius, and the radii themselves."""
        steps = np.linspace(0, max(self.rho), 11)
        return sorted({*self.rho, *(float(f"{rho:.6g}") for rho in steps)})


class Kind(NamedTuple):
    """A kind of number: what tables and figures call it, its digits (0: not shown), and unit."""

    heading: str
    digits: int
    unit: str
    meaning: str


KINDS = {
    "sharpness": Kind(
        "sharpness", 3, "nats", "the largest rise of the loss within rho (with m: mean of groups)"
    ),
    "adaptive_sharpness": Kind(
        "adaptive\nsharpness", 3, "nats", "the same within radius rho relative to the weights"
    ),
    "lambda_1": Kind("λ₁", 2, "", "the largest eigenvalue of the Hessian"),
    "lambda_ratio": Kind("λ₁/λ₅", 2, "", "lambda_1 divided by the fifth largest eigenvalue"),
    "residual": Kind("", 0, "", "the largest residual of the five, as a share of lambda_1"),
    "start_loss": Kind(
        "loss at\nthe start", 2, "nats", "at w + delta_0, mean over draws (gamma 0: at w)"
    ),
    "cosine": Kind(
        "cosine", 3, "", "of the gradients at the start and after a step of length rho along it"
    ),
    "perturbed_loss": Kind("loss after\nthe step", 2, "nats", "after that step, mean over draws"),
}


class Quantity(NamedTuple):
    """What a number is, with its norm, radius and noise where it has them."""

    measure: str
    p: float | None = None
    rho: float | None = None
    gamma: float | None = None

    @property
    def kind(self) -> Kind:
        """How it is shown."""
        return KINDS[self.measure]

    @property
    def heading(self) -> str:
        """Its name with norm, radius and unit, on several lines."""
        p = f"p = {short(self.p)}" if self.p not in (None, 2) else ""
        rho = f"ρ = {short(self.rho)}" if self.rho is not None else ""
        return "\n".join(filter(None, (self.kind.heading, p, rho, self.kind.unit)))


Numbers: TypeAlias = Mapping[Quantity, float | None]


def short(x: float | None) -> str:
    """A norm or a radius as text."""
    return "∞" if x == math.inf else f"{x:g}"


def quantities(options: Analyze) -> list[Quantity]:
    """All that is measured of each network."""
    found = [
        Quantity(name, p, rho)
        for name, radii in options.radii.items()
        for p in options.p
        for rho in radii
    ]
    if "eigenvalues" in options.measures:
        found += map(Quantity, ("lambda_1", "lambda_ratio", "residual"))
    for gamma in options.gamma if "stability" in options.measures else ():
        found.append(Quantity("start_loss", gamma=gamma))
        for name in ("cosine", "perturbed_loss"):
            found += [Quantity(name, None, rho, gamma) for rho in options.stability_radii]
    return found


def measure(network: Network, options: Analyze) -> Numbers:
    """The numbers of a network; ``None`` where it has diverged."""
    asked, variables = quantities(options), network.load()
    if variables is None:
        return dict.fromkeys(asked)
    params, found = variables["params"], list[Any]()
    if options.radii:
        loss = network.loss(variables, group=options.m)
        how = {"grouped": options.m is not None, "steps": options.steps}
        found = [rise(loss, params, of, **how) for of in asked if of.measure in options.radii]
    if "eigenvalues" in options.measures:
        loss = network.loss(variables)
        of = analysis.hessian_eigenvalues(loss, params, k=5, steps=options.lanczos_steps)
        found += [of.values[0], of.ratio(5), np.max(np.abs(of.residuals)) / abs(of.values[0])]
    if "stability" in options.measures:
        curves = analysis.gradient_stability(
            network.loss(variables, group=network.entry.recipe.batch_size, train=True),
            params,
            options.stability_radii,
            options.gamma,
            draws=options.draws,
            noise_scale=options.noise_scale,  # type: ignore[arg-type]  # one of its names
        )
        parts = curves.start_loss[..., None], curves.cosine, curves.loss
        found += [*np.concatenate(parts, axis=-1).mean(axis=1).ravel()]
    return {what: number(np.asarray(x)) for what, x in zip(asked, found, strict=True)}


def rise(loss: Any, params: optax.Params, what: Quantity, **how: Any) -> jax.Array:
    """Sharpness or adaptive sharpness; with ``grouped`` m-sharpness, a group for each batch."""
    return _rise(loss, params, what.rho, name=what.measure, p=what.p, **how)


@functools.partial(jax.jit, static_argnames=("name", "p", "steps", "restarts", "grouped"))
def _rise(
    loss: Any, params: optax.Params, rho: Any, *, name: str, grouped: bool = False, **how: Any
) -> jax.Array:
    how |= ADAPTIVE if name == "adaptive_sharpness" else {}

    def of(loss: Any) -> jax.Array:
        return getattr(analysis, name)(loss, params, rho, **how).value

    if not grouped:
        return of(loss)
    # The measures' group_size needs batches without padding and statistics of BatchNorm.
    values = jax.lax.map(lambda batch: of(lambda w: loss.loss_fn(w, batch)), loss.batches)
    return jnp.average(values, weights=loss.weights)
