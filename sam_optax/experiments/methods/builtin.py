# ruff: noqa: D103 (a title says what each is)
"""The methods that are built in, in the order in which they are listed.

Their hyperparameters were chosen on digits with 40 % wrong training labels by ``compare --tune``.
"""

from typing import Annotated, Any

import optax

import sam_optax
from sam_optax.experiments.methods.method import Base, Optimizer, Step, method
from sam_optax.experiments.types import Record

Rho = Annotated[float, "Radius ρ of the perturbation."]
Eta = Annotated[float, "η, added to |w| in the normalization operator."]
Norm = Annotated[float | None, "Norm p of the neighbourhood, such as 2 or inf."]
Operator = Annotated[str | None, "Normalization operator: elementwise or filterwise."]
OnBiases = Annotated[bool | None, "Whether biases are normalized as other params are."]
Noise = Annotated[float, "Scale γ of the random start's noise."]
Along = Annotated[float, "Weight λ of the gradient relative to the noise."]
Removed = Annotated[float, "Share σ of the full gradient that is removed."]
EmaDecay = Annotated[float, "Decay λ of the average that estimates the full gradient."]
FisherWeight = Annotated[float, "Weight η of the Fisher information."]
Perturbed = Annotated[float, "Share β of the params that is perturbed."]
Rising = Annotated[float, "Share γ of the examples in the second pass."]
Chance = Annotated[float, "Probability that a step perturbs."]
Period = Annotated[int, "Period of the SAM steps."]
Reused = Annotated[float, "Size α of the reused part."]
Threshold = Annotated[float, "Threshold in standard deviations of the squared gradient norm."]
StatsDecay = Annotated[float, "Decay δ of its statistics."]
PartSize = Annotated[float, "Share of the batch for the ascent gradient."]

# Methods that use past gradients perturb all groups of a batch alike.
_PAST: dict[str, Any] = {"gradients": 1, "groups": False}


@method("the base optimizer", gradients=1, groups=False, radius=(), weight_decay=0.0045)
def sgd(base: Base) -> Optimizer:
    return base.tx


@method("SAM", weight_decay=5.56e-05)
def sam(base: Base, rho: Rho = 0.5) -> Optimizer:
    return base.sharp(sam_optax.sam(rho))


# ASAM's figure 4 varies p and the normalization.
@method("ASAM")
def asam(
    base: Base,
    rho: Rho = 2.0,
    eta: Eta = 0.01,
    p: Norm = None,
    normalization: Operator = None,
    normalize_biases: OnBiases = None,
) -> Optimizer:
    operator: Any = normalization or "elementwise"
    biases = False if normalize_biases else None  # found by their names
    norm = 2.0 if p is None else p
    return base.sharp(sam_optax.asam(rho, eta, p=norm, normalization=operator, bias_mask=biases))


# With the default λ, the cosine of ε and the gradient is 0.89, so ρ = 0.6 goes about as far along
# the gradient as SAM with 0.5.
@method("R-SAM", weight_decay=1.85e-05)
def rsam(base: Base, rho: Rho = 0.6, gamma: Noise = 0.1, lmbda: Along = 2.0) -> Optimizer:
    return base.sharp(sam_optax.rsam(rho, gamma, lmbda, key=base.key))


@method("F-SAM")
def fsam(base: Base, rho: Rho = 0.5, sigma: Removed = 1.0, lmbda: EmaDecay = 0.9) -> Optimizer:
    return base.sharp(sam_optax.fsam(rho, sigma, lmbda))


@method("Fisher SAM")
def fisher_sam(base: Base, rho: Rho = 0.5, eta: FisherWeight = 1.0) -> Optimizer:
    return base.sharp(sam_optax.fisher_sam(rho, eta))


@method("GSAM", radius=("rho_max", "rho_min"), weight_decay=0.0015)
def gsam(
    base: Base,
    rho_max: Annotated[float, "Radius ρ at the highest learning rate."] = 0.4,
    rho_min: Annotated[float, "Radius ρ at learning rate 0."] = 0.1,
    alpha: Annotated[float, "Weight α of the surrogate gap's gradient."] = 0.1,
    lr_max: Annotated[float, "Learning rate at which the radius is ρ."] = 0.1,
) -> Optimizer:
    radii = {"rho_max": rho_max, "rho_min": rho_min, "lr_min": 0, "lr_max": lr_max}
    rho = sam_optax.rho_from_learning_rate(base.learning_rate, **radii)
    return base.sharp(sam_optax.sam(rho), sam_optax.surrogate_gap(alpha))


def _check(fraction: float) -> None:
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction must be in (0, 1], got {fraction!r}.")


def _rising(step: Step, fraction: float, **_: Any) -> Record:
    rising = sam_optax.rising_samples(step.losses_fn, step.params, step.batch, fraction)
    return {"grad_fn": rising, "ascent_grad_fn": step.grad_fn(step.batch)}


@method("ESAM", arguments=_rising, weight_decay=0.000167)
def esam(base: Base, rho: Rho = 0.25, beta: Perturbed = 0.6, fraction: Rising = 0.5) -> Optimizer:
    _check(fraction)
    return base.sharp(optax.chain(sam_optax.sam(rho), sam_optax.random_mask(beta, key=base.key)))


@method("SS-SAM", gradients=lambda _, p, **__: 1 + p)
def ss_sam(base: Base, rho: Rho = 0.5, p: Chance = 0.5) -> Optimizer:
    return base.sharp(sam_optax.sam(rho), when=sam_optax.bernoulli(p, key=base.key))


@method("SAM at every k-th step", gradients=lambda _, k, **__: 1 + 1 / k)
def every(base: Base, rho: Rho = 1.0, k: Period = 5) -> Optimizer:
    return base.sharp(sam_optax.sam(rho), when=sam_optax.every(k))


@method("LookSAM", gradients=lambda _, k, **__: 1 + 1 / k)
def looksam(base: Base, rho: Rho = 0.075, k: Period = 5, alpha: Reused = 0.7) -> Optimizer:
    descent = sam_optax.reuse_orthogonal(alpha)
    return base.sharp(sam_optax.sam(rho), descent, when=sam_optax.every(k))


@method("AE-SAM", groups=False)  # at most 2 gradients
def ae_sam(base: Base, rho: Rho = 0.5, c: Threshold = 0.0, decay: StatsDecay = 0.9) -> Optimizer:
    return base.sharp(sam_optax.sam(rho), when=sam_optax.above_average(c, decay))


def _part(step: Step, fraction: float, **_: Any) -> Record:
    few = sam_optax.part_of_batch(step.batch, fraction)
    return {"grad_fn": step.grad_fn(step.batch), "ascent_grad_fn": step.grad_fn(few)}


@method(
    "SAM, ascent on part of the batch",
    gradients=lambda _, fraction, **__: 1 + fraction,
    arguments=_part,
    weight_decay=0.000167,
)
def part(base: Base, rho: Rho = 0.95, fraction: PartSize = 0.02) -> Optimizer:
    _check(fraction)
    return base.sharp(sam_optax.sam(rho))


@method("ascent along past gradients", **_PAST)
def momentum(base: Base, rho: Rho = 0.3) -> Optimizer:
    return base.sharp(sam_optax.momentum_start(sam_optax.sam(rho), base.decay))


def _ahead(base: Base, perturbation: Optimizer) -> Optimizer:
    """Along the base optimizer's momentum, in the direction of its step."""
    opposite = optax.chain(perturbation, optax.scale(-1.0))
    return base.sharp(sam_optax.momentum_start(opposite, base.decay))


@method("Momentum-SAM", **_PAST, weight_decay=0.0015)
def msam(base: Base, rho: Rho = 1.0) -> Optimizer:
    return _ahead(base, sam_optax.sam(rho))


@method("Momentum-SAM with ASAM's normalization", **_PAST, weight_decay=0.000167)
def m_asam(base: Base, rho: Rho = 5.0, eta: Eta = 0.01) -> Optimizer:
    return _ahead(base, sam_optax.asam(rho, eta))
