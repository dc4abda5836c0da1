# ruff: noqa: D103 (the papers' Greek letters, in help texts; a title says what each is)
"""SAM, ASAM, R-SAM, F-SAM, and their relatives with an ascent gradient of their own."""

import inspect
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax

import sam_optax
from sam_optax.experiments.methods.method import Arguments, Base, Optimizer, Step, method
from sam_optax.experiments.types import PyTree

_RSAM = inspect.signature(sam_optax.rsam).parameters
_GAMMA, _LMBDA = _RSAM["gamma"].default, _RSAM["lmbda"].default


@method("the base optimizer", gradients=1, groups=False, radius=(), weight_decay=0.0045)
def sgd(base: Base) -> Optimizer:
    return base.tx


@method("SAM", weight_decay=5.56e-05)
def sam(base: Base, rho: float = 0.5) -> Optimizer:
    return base.sharp(sam_optax.sam(rho))


# ASAM's figure 4 varies p and the normalization.
@method("ASAM")
def asam(
    base: Base,
    rho: float = 2.0,
    eta: float = 0.01,
    p: float | None = None,
    normalization: str | None = None,
    normalize_biases: bool | None = None,
) -> Optimizer:
    operator: Any = normalization or "elementwise"
    biases = False if normalize_biases else None  # found by their names
    norm = 2.0 if p is None else float(p)  # which is text in results, if it is infinite
    return base.sharp(sam_optax.asam(rho, eta, p=norm, normalization=operator, bias_mask=biases))


# With the default λ, the cosine of ε and the gradient is 0.89, so ρ = 0.6 goes about as far along
# the gradient as SAM with 0.5.
@method("R-SAM", weight_decay=1.85e-05)
def rsam(base: Base, rho: float = 0.6, gamma: float = _GAMMA, lmbda: float = _LMBDA) -> Optimizer:
    return base.sharp(sam_optax.rsam(rho, gamma, lmbda, key=base.key))


@method("F-SAM")
def fsam(base: Base, rho: float = 0.5, sigma: float = 1.0, lmbda: float = 0.9) -> Optimizer:
    return base.sharp(sam_optax.fsam(rho, sigma, lmbda))


@method("F-ASAM")
def f_asam(
    base: Base, rho: float = 2.0, eta: float = 0.01, sigma: float = 1.0, lmbda: float = 0.9
) -> Optimizer:
    return _friendly(base, sam_optax.asam(rho, eta), sigma, lmbda)


@method("Fisher SAM")
def fisher_sam(base: Base, rho: float = 0.5, eta: float = 1.0) -> Optimizer:
    return base.sharp(sam_optax.fisher_sam(rho, eta))


@method("F-FisherSAM")
def f_fisher_sam(
    base: Base, rho: float = 0.5, eta: float = 1.0, sigma: float = 1.0, lmbda: float = 0.9
) -> Optimizer:
    return _friendly(base, sam_optax.fisher_sam(rho, eta), sigma, lmbda)


def _friendly(base: Base, perturbation: Optimizer, sigma: float, lmbda: float) -> Optimizer:
    """The gradient without its full-gradient component, then a perturbation along it."""
    return base.sharp(optax.chain(sam_optax.remove_full_gradient(sigma, lmbda), perturbation))


@method("GSAM", radius=("rho_max", "rho_min"), weight_decay=0.0015)
def gsam(
    base: Base, rho_max: float = 0.4, rho_min: float = 0.1, alpha: float = 0.1, lr_max: float = 0.1
) -> Optimizer:
    radii = {"rho_max": rho_max, "rho_min": rho_min, "lr_min": 0, "lr_max": lr_max}
    rho = sam_optax.rho_from_learning_rate(base.learning_rate, **radii)
    return base.sharp(sam_optax.sam(rho), sam_optax.surrogate_gap(alpha))


@method("R-GSAM")
def rgsam(
    base: Base, rho: float = 0.5, gamma: float = _GAMMA, lmbda: float = _LMBDA, alpha: float = 0.1
) -> Optimizer:
    rsam = sam_optax.rsam(rho, gamma, lmbda, key=base.key)
    return base.sharp(rsam, sam_optax.surrogate_gap(alpha))


def _odds(gamma: float) -> float:
    if not 0 <= gamma < 1:
        raise ValueError(f"gamma must be in [0, 1), got {gamma!r}.")
    return gamma / (1 - gamma)


@method("WSAM, coupled: a weighted sum of both gradients")
def wsam(base: Base, rho: float = 0.5, gamma: float = 0.5) -> Optimizer:
    return base.sharp(sam_optax.sam(rho), sam_optax.mix_gradients(_odds(gamma)))


@method("WSAM, decoupled", weight_decay=0.000167)
def wsam_decoupled(base: Base, rho: float = 0.5, gamma: float = 0.9) -> Optimizer:
    around = sam_optax.decoupled_sharpness(base.tx, base.learning_rate, _odds(gamma))
    return base._replace(make=lambda _: optax.identity()).sharp(sam_optax.sam(rho), around)


@method("VaSSO", weight_decay=1.85e-05)
def vasso(base: Base, rho: float = 0.5, theta: float = 0.4) -> Optimizer:
    if not 0 < theta <= 1:
        raise ValueError(f"theta must be in (0, 1], got {theta!r}.")
    return base.sharp(optax.chain(sam_optax.smooth_gradient(1 - theta), sam_optax.sam(rho)))


@method("SSAM with a Fisher mask")
def ssam_f(base: Base, rho: float = 0.5, sparsity: float = 0.5, every: int = 100) -> Optimizer:
    mask = sam_optax.sparsify(sparsity, every=every, choice="fisher", key=base.key)
    return base.sharp(optax.chain(sam_optax.sam(rho), mask))


@method("SSAM with a dynamic mask")
def ssam_d(
    base: Base, rho: float = 0.5, sparsity: float = 0.5, every: int = 100, drop: float = 0.5
) -> Optimizer:
    mask = sam_optax.sparsify(sparsity, every=every, choice="dynamic", drop=drop, key=base.key)
    return base.sharp(optax.chain(sam_optax.sam(rho), mask))


def _reweighted(step: Step, **_: Any) -> Arguments:
    ascent = sam_optax.reweighted_ascent(step.losses_fn, step.batch, key=step.key)
    return {"ascent_grad_fn": ascent}


@method("δ-SAM", gradients=3, arguments=_reweighted)
def delta_sam(base: Base, rho: float = 0.5) -> Optimizer:
    return base.sharp(sam_optax.sam(rho))


@method(
    "SAM along the full gradient",
    gradients=lambda batches, **_: 1 + batches,
    arguments=lambda step, **_: {"ascent_grad_fn": step.full_grad_fn},
    needs_data=True,
)
def sam_full(base: Base, rho: float = 0.5) -> Optimizer:
    return base.sharp(sam_optax.sam(rho))


def _others(step: Step, count: int) -> Callable[[chex.Numeric], PyTree]:
    """The i-th of some batches of other examples, which are not augmented."""
    shape = count, len(step.batch[1])
    index = jax.random.choice(step.key, len(step.data[1]), shape, replace=False)
    return lambda i: jax.tree.map(lambda leaf: jnp.asarray(leaf)[index[i]], step.data)


@method(
    "SAM along another batch",
    arguments=lambda step, **_: {"ascent_grad_fn": step.grad_fn(_others(step, 1)(0))},
    needs_data=True,
)
def sam_db(base: Base, rho: float = 0.5) -> Optimizer:
    return base.sharp(sam_optax.sam(rho))


def _several_batches(step: Step, batches: int, **_: Any) -> Arguments:
    """The ascent gradient on the batch and on others, at most on all data."""
    if batches < 1:
        raise ValueError(f"batches must be at least 1, got {batches!r}.")
    if batches == 1:
        return {}
    if batches * len(step.batch[1]) >= len(step.data[1]):
        return {"ascent_grad_fn": step.full_grad_fn}
    another = _others(step, batches - 1)
    others = sam_optax.accumulate(lambda w, i: step.grad_fn(another(i))(w), batches - 1)

    def mean(params: optax.Params) -> PyTree:
        grads = step.grad_fn(step.batch)(params), others(params)
        return jax.tree.map(lambda g, rest: (g + (batches - 1) * rest) / batches, *grads)

    return {"ascent_grad_fn": mean}


@method(
    "SAM along several batches",
    gradients=lambda data, batches, **_: 1 + min(data, batches),
    arguments=_several_batches,
    needs_data=True,
)
def sam_batches(base: Base, rho: float = 0.5, batches: int = 2) -> Optimizer:
    return base.sharp(sam_optax.sam(rho))


@method(
    "SAM orthogonal to the full gradient",
    gradients=lambda batches, **_: 2 + batches,
    arguments=lambda step, **_: {"full_grads": step.full_grad_fn(step.params)},
    needs_data=True,
)
def sam_noise(base: Base, rho: float = 0.5) -> Optimizer:
    return base.sharp(optax.chain(sam_optax.project_out(), sam_optax.sam(rho)))
