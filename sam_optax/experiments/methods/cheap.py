# ruff: noqa: D103 (the papers' Greek letters, in help texts; a title says what each is)
"""Methods whose step costs less than SAM's."""

from typing import Any

import optax

import sam_optax
from sam_optax.experiments.methods.method import Arguments, Base, Optimizer, Step, method

# Methods that use past gradients perturb all groups of a batch alike.
_PAST: dict[str, Any] = {"gradients": 1, "groups": False}


def _rising(step: Step, fraction: float, **_: Any) -> Arguments:
    rising = sam_optax.rising_samples(step.losses_fn, step.params, step.batch, fraction)
    return {"grad_fn": rising, "ascent_grad_fn": step.grad_fn(step.batch)}


@method("ESAM", arguments=_rising, weight_decay=0.000167)
def esam(base: Base, rho: float = 0.25, beta: float = 0.6, fraction: float = 0.5) -> Optimizer:
    return base.sharp(optax.chain(sam_optax.sam(rho), sam_optax.random_mask(beta, key=base.key)))


@method("SS-SAM", gradients=lambda _, p, **__: 1 + p)
def ss_sam(base: Base, rho: float = 0.5, p: float = 0.5) -> Optimizer:
    return base.sharp(sam_optax.sam(rho), when=sam_optax.bernoulli(p, key=base.key))


@method("SAM at every k-th step", gradients=lambda _, k, **__: 1 + 1 / k)
def every(base: Base, rho: float = 1.0, k: int = 5) -> Optimizer:
    return base.sharp(sam_optax.sam(rho), when=sam_optax.every(k))


@method("LookSAM", gradients=lambda _, k, **__: 1 + 1 / k)
def looksam(base: Base, rho: float = 0.075, k: int = 5, alpha: float = 0.7) -> Optimizer:
    reuse = sam_optax.reuse_orthogonal(alpha)
    return base.sharp(sam_optax.sam(rho), reuse, when=sam_optax.every(k))


@method("AE-SAM", groups=False)  # at most 2 gradients
def ae_sam(base: Base, rho: float = 0.5, c: float = 0.0, decay: float = 0.9) -> Optimizer:
    return base.sharp(sam_optax.sam(rho), when=sam_optax.above_average(c, decay))


def _part(step: Step, fraction: float, **_: Any) -> Arguments:
    return {"ascent_grad_fn": step.grad_fn(sam_optax.part_of_batch(step.batch, fraction))}


@method(
    "SAM, ascent on part of the batch",
    gradients=lambda _, fraction, **__: 1 + fraction,
    arguments=_part,
    weight_decay=0.000167,
)
def part(base: Base, rho: float = 0.95, fraction: float = 0.02) -> Optimizer:
    return base.sharp(sam_optax.sam(rho))


@method("ascent along past gradients", **_PAST)
def momentum(base: Base, rho: float = 0.3) -> Optimizer:
    return base.sharp(sam_optax.momentum_start(sam_optax.sam(rho), base.decay))


def _ahead(base: Base, perturbation: Optimizer) -> Optimizer:
    """Along the base optimizer's momentum, in the direction of its step."""
    opposite = optax.chain(perturbation, optax.scale(-1.0))
    return base.sharp(sam_optax.momentum_start(opposite, base.decay))


@method("Momentum-SAM", **_PAST, weight_decay=0.0015)
def msam(base: Base, rho: float = 1.0) -> Optimizer:
    return _ahead(base, sam_optax.sam(rho))


@method("Momentum-SAM with ASAM's normalization", **_PAST, weight_decay=0.000167)
def m_asam(base: Base, rho: float = 5.0, eta: float = 0.01) -> Optimizer:
    return _ahead(base, sam_optax.asam(rho, eta))


@method("LPF-SGD: smoothing by noise", gradients=1, radius=("gamma",))
def low_pass(base: Base, gamma: float = 0.02, samples: int = 1) -> Optimizer:
    return base.sharp(sam_optax.low_pass(gamma, samples=samples, key=base.key))
