"""What is measured of a network, as numbers."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sam_optax import analysis
from sam_optax.experiments.analyze.options import Analyze
from sam_optax.experiments.finished import Losses, Network
from sam_optax.experiments.reporting.results import number
from sam_optax.experiments.types import PyTree, Record

ADAPTIVE: dict[str, Any] = {"normalization": "elementwise", "eta": 0.0, "bias_mask": None}
"""How adaptive sharpness is measured: as ASAM trains, biases not normalized, but with η = 0.
It is not invariant where hidden biases are rescaled."""
RISES: dict[str, Callable[..., analysis.Sharpness]] = {
    "sharpness": analysis.sharpness,
    "adaptive_sharpness": functools.partial(analysis.adaptive_sharpness, **ADAPTIVE),
}
EIGENVALUES = ("lambda_1", "lambda_ratio", "residual")
UNITS = {
    "sharpness": "nats, the largest rise of the loss found within rho (with m: mean of groups)",
    "adaptive_sharpness": "nats, the same within radius rho relative to the weights",
    "lambda_1": "the largest eigenvalue of the Hessian",
    "lambda_ratio": "lambda_1 divided by the fifth largest eigenvalue",
    "residual": "the largest residual of the five, as a share of lambda_1",
    "start_loss": "nats, the loss at the start w + delta_0, mean over draws (gamma 0: at w)",
    "cosine": "of the gradient at the start and that after a step of length rho along it, mean",
    "perturbed_loss": "nats, the loss after that step, mean over draws",
}


class Quantity(NamedTuple):
    """What a number is, with its norm, radius and noise where it has them."""

    measure: str
    p: float | None = None
    rho: float | None = None
    gamma: float | None = None


class Measured(NamedTuple):
    """A network with its numbers; ``run`` names its run if there are several."""

    run: str
    network: Network
    values: dict[Quantity, float | None]

    @property
    def title(self) -> str:
        """The method, and the run if there are several."""
        return f"{self.run}: {self.network.name}" if self.run else self.network.name


def stability_radii(options: Analyze) -> list[float]:
    """Ten equal steps up to the largest radius, and the radii themselves."""
    steps = np.linspace(0, max(options.rho), 11)
    return sorted({*options.rho, *(float(f"{rho:.6g}") for rho in steps)})


def quantities(options: Analyze) -> list[Quantity]:
    """All that is measured of each network."""
    found = [
        Quantity(measure, p, rho)
        for measure, radii in zip(RISES, (options.rho, options.adaptive_rho), strict=True)
        for p in options.p
        for rho in radii
        if measure in options.measures
    ]
    if "eigenvalues" in options.measures:
        found += map(Quantity, EIGENVALUES)
    for gamma in options.gamma if "stability" in options.measures else ():
        found.append(Quantity("start_loss", gamma=gamma))
        for measure in ("cosine", "perturbed_loss"):
            found += [Quantity(measure, None, rho, gamma) for rho in stability_radii(options)]
    return found


def measure(network: Network, losses: Losses, options: Analyze) -> dict[Quantity, float | None]:
    """The numbers of a network; ``None`` where it has diverged."""
    variables = network.load()
    if not all_finite(variables["params"]):
        return dict.fromkeys(quantities(options))
    params, labels = jax.tree.map(jnp.asarray, variables["params"]), network.labels()

    def loss(**how: Any) -> analysis.DatasetLoss:
        return losses(network, **how)(labels, variables)

    @functools.cache
    def eigenvalues() -> Record:
        found = analysis.hessian_eigenvalues(loss(), params, k=5, steps=options.lanczos_steps)
        residual = np.max(np.abs(found.residuals)) / abs(found.values[0])
        return dict(zip(EIGENVALUES, (found.values[0], found.ratio(5), residual), strict=True))

    @functools.cache
    def stability() -> dict[str, np.ndarray]:
        batch_size = network.run.task.entries[network.name].recipe.batch_size
        found = analysis.gradient_stability(
            loss(group=batch_size, train=True),
            params,
            stability_radii(options),
            options.gamma,
            draws=options.draws,
            noise_scale=options.noise_scale,  # type: ignore[arg-type]  # one of its names
        )
        curves = {"cosine": found.cosine, "perturbed_loss": found.loss}
        curves["start_loss"] = found.start_loss[..., None]
        return {name: np.mean(of_all, axis=1) for name, of_all in curves.items()}

    def value(what: Quantity) -> Any:
        name, p, rho, gamma = what
        if name in EIGENVALUES:
            return eigenvalues()[name]
        if name not in RISES:
            i = 0 if rho is None else stability_radii(options).index(rho)
            return stability()[name][options.gamma.index(gamma), i]
        how = {"p": p, "steps": options.steps}
        if options.m is None:
            return RISES[name](loss(), params, rho, **how).value
        return _mean_rise(loss(group=options.m), params, rho, name=name, **how)

    return {what: number(np.asarray(value(what))) for what in quantities(options)}


@functools.partial(jax.jit, static_argnames=("name", "p", "steps"))
def _mean_rise(
    loss: analysis.DatasetLoss, params: optax.Params, rho: jax.Array, *, name: str, **how: Any
) -> jax.Array:
    """m-sharpness, where each batch of the loss is a group of its own.

    (``group_size`` of the measures needs batches without padding and statistics of BatchNorm.)
    """

    def of_group(batch: PyTree) -> jax.Array:
        return RISES[name](lambda w: loss.loss_fn(w, batch), params, rho, **how).value

    return jnp.average(jax.lax.map(of_group, loss.batches), weights=loss.weights)


def all_finite(tree: PyTree) -> bool:
    """Whether there is neither NaN nor infinity."""
    return all(bool(np.all(np.isfinite(leaf))) for leaf in jax.tree.leaves(tree))
