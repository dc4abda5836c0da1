# ruff: noqa: RUF001, D103 (the papers' Greek letters, in help texts; a title says what each is)
"""Methods that are known by their paper's name alone.

The learning rates of those with their own base optimizer had the highest accuracy on held-out
examples among four.
"""

from typing import TypeAlias

import jax
import optax

import sam_optax
from sam_optax.experiments.methods import arguments
from sam_optax.experiments.methods.method import Base
from sam_optax.experiments.methods.registry import method

Optimizer: TypeAlias = optax.GradientTransformation
_START_OF_SUM = 1e-8


@method("LE-SAM", {"tau": "Budget τ for the rise of the loss."}, radius=("rho", "tau"))
def le_sam(base: Base, rho: float = 1.0, tau: float = 0.2) -> Optimizer:
    return base.sharp(sam_optax.limit_rise(sam_optax.sam(rho), tau))


@method("Stable SAM")
def stable_sam(base: Base, rho: float = 0.5) -> Optimizer:
    return base.sharp(sam_optax.sam(rho), sam_optax.match_ascent_norm())


@method("GC-SAM", weight_decay=0.0015)
def gc_sam(base: Base, rho: float = 0.5) -> Optimizer:
    """Both gradients without their means over the inputs of each output, in Flax's layout."""

    def centred(x: jax.Array) -> jax.Array:
        return x - x.mean(range(x.ndim - 1), keepdims=True) if x.ndim > 1 else x

    centralize = optax.stateless(lambda g, _: jax.tree.map(centred, g))
    return base.sharp(optax.chain(centralize, sam_optax.sam(rho)), centralize)


@method(
    "ZSharp", {"quantile": "Share of a layer that does not lead the ascent."}, weight_decay=0.0015
)
def zsharp(base: Base, rho: float = 0.5, quantile: float = 0.95) -> Optimizer:
    return base.sharp(optax.chain(sam_optax.zscore_filter(quantile), sam_optax.sam(rho)))


@method(
    "Lookbehind-SAM",
    {
        "k": "Number of ascents, and of steps of the base optimizer.",
        "alpha": "Share α of the way of these steps.",
    },
    gradients=lambda batches, k, **_: 1 + k,
    arguments=arguments.gradient,
)
def lookbehind(base: Base, rho: float = 0.25, k: int = 2, alpha: float = 0.5) -> Optimizer:
    """The learning rate follows the training steps, each with k of the base."""
    tx = base.make(lambda count: base.learning_rate(count // k))
    return sam_optax.lookbehind(tx, sam_optax.sam(rho), k, alpha)


@method("XSAM", {"every": "Steps between two searches of the maximum."}, arguments=arguments.value)
def xsam(base: Base, rho: float = 0.5, every: int = 100) -> Optimizer:
    """Its search has the radius of the perturbation."""
    return base.sharp(sam_optax.sam(rho), sam_optax.toward_maximum(rho, every))


@method(
    "X-SAM",
    {
        "alpha": "Share α of the sharp gradient that is removed along the eigenvector.",
        "iterations": "Power iterations for the eigenvector, at every step.",
    },
    gradients=lambda batches, iterations, **_: 2 + 2 * iterations,
    arguments=arguments.eigenvector,
)
def x_sam(base: Base, rho: float = 0.25, alpha: float = 0.5, iterations: int = 5) -> Optimizer:
    return base.sharp(sam_optax.sam(rho), sam_optax.away_from_eigenvector(alpha))


@method(
    "GAM",
    {"alpha": "Weight α of the gradient norm's gradient."},
    gradients=5,  # two are products with the Hessian
    arguments=arguments.steepness,
    weight_decay=5.56e-05,
)
def gam(base: Base, rho: float = 0.5, alpha: float = 1.0) -> Optimizer:
    return base.sharp(sam_optax.sam(rho))


@method(
    "SAMPa",
    {"lmbda": "Share λ of the gradient at the step ahead."},
    arguments=arguments.two_batches,
    needs_previous=True,
    weight_decay=0.0015,
)
def sampa(base: Base, rho: float = 0.5, lmbda: float = 0.2) -> Optimizer:
    """On one device."""
    return sam_optax.simultaneous(base.tx, sam_optax.sam(rho), lmbda)


@method("AdaSAM", weight_decay=0.0015)
def ada_sam(base: Base, rho: float = 0.5, lr: float = 0.03) -> Optimizer:
    """AMSGrad as the base optimizer."""
    return base.replaced(optax.amsgrad, lr).sharp(sam_optax.sam(rho))


@method("LightSAM")
def light_sam(base: Base, rho: float = 0.005, lr: float = 0.1) -> Optimizer:
    """AdaGrad, and ε divided by AdaGrad's accumulator of the ascent gradients."""
    adagrad = base.replaced(lambda rate: optax.adagrad(rate, _START_OF_SUM, eps=0.0), lr)
    return adagrad.sharp(optax.chain(optax.scale_by_rss(_START_OF_SUM, 0.0), optax.scale(rho)))


@method(
    "SAM-Polyak",
    {"largest": "Largest learning rate γ_b."},
    arguments=arguments.linearized_back,
    decays=False,
)
def sam_polyak(base: Base, rho: float = 0.25, largest: float = 0.3) -> Optimizer:
    """Polyak's step size, in place of the base optimizer."""
    return base._replace(make=lambda _: optax.polyak_sgd(largest)).sharp(sam_optax.sam(rho))


@method(
    "bSAM",
    {"beta1": "Decay β₁ of the average of gradients.", "beta2": "Decay β₂ of the precision."},
    decays=False,  # it is the prior's precision, which has to be a number
)
def bsam(
    base: Base, rho: float = 0.08, lr: float = 1.0, beta1: float = 0.9, beta2: float = 0.999
) -> Optimizer:
    """Its descent divides by the precision of its perturbation."""
    prior = {"data_size": base.examples, "weight_decay": base.weight_decay}
    pieces = optax.add_decayed_weights(base.weight_decay), optax.ema(beta1, debias=False)
    descent = optax.chain(*pieces, sam_optax.scale_by_precision())
    scale = optax.scale_by_learning_rate(lambda step: lr * base.learning_rate(step))
    perturbation = sam_optax.bsam(rho, **prior, decay=beta2, key=base.key)
    return base._replace(make=lambda _: scale).sharp(perturbation, descent)
