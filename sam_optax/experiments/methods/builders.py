"""Builders of the methods in the registry."""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import jax
import optax

import sam_optax
from sam_optax.experiments.methods.method import Base

Perturbation: TypeAlias = optax.GradientTransformation
Optimizer: TypeAlias = optax.GradientTransformation
T = TypeVar("T")


def built(make: Callable[..., Perturbation]) -> Callable[..., Optimizer]:
    """The base optimizer driven by the perturbation ``make(key, **hyperparameters)``."""
    return lambda base, key, **options: base.sharp(make(key, **options))


def keyless(make: Callable[..., T]) -> Callable[..., T]:
    """Something without randomness."""
    return lambda key, **options: make(**options)


def keyed(make: Callable[..., T]) -> Callable[..., T]:
    """Something that takes a key."""
    return lambda key, **options: make(**options, key=key)


def before_sam(make: Callable[..., Perturbation]) -> Callable[..., Optimizer]:
    """SAM along what the piece ``make(**hyperparameters)`` makes of the gradient."""
    return built(lambda key, rho, **options: optax.chain(make(**options), sam_optax.sam(rho)))


def after_sam(make: Callable[..., Optimizer]) -> Callable[..., Optimizer]:
    """SAM with the descent ``make(**hyperparameters)``."""
    return lambda base, key, rho, **options: base.sharp(sam_optax.sam(rho), make(**options))


def sam_when(make: Callable[..., Any]) -> Callable[..., Optimizer]:
    """SAM at the steps that ``make(key, **hyperparameters)`` chooses."""
    return lambda base, key, rho, **rest: base.sharp(sam_optax.sam(rho), when=make(key, **rest))


def friendly(make: Callable[..., Perturbation]) -> Callable[..., Perturbation]:
    """A perturbation along the gradient without its full-gradient component."""
    return lambda key, sigma, lmbda, **options: optax.chain(
        sam_optax.remove_full_gradient(sigma, lmbda), make(**options)
    )


def asam(
    key: jax.Array,
    rho: float,
    eta: float,
    p: float | str = 2,
    normalization: Any = "elementwise",
    normalize_biases: bool = False,
) -> Perturbation:
    """ASAM; an infinite p may be text, as in results, and biases are found by their names."""
    biases = False if normalize_biases else None
    return sam_optax.asam(rho, eta, p=float(p), normalization=normalization, bias_mask=biases)


def smooth(theta: float) -> Perturbation:
    """VaSSO's average, in which the new gradient weighs θ."""
    if not 0 < theta <= 1:
        raise ValueError(f"theta must be in (0, 1], got {theta!r}.")
    return sam_optax.smooth_gradient(1 - theta)


def sparse(key: jax.Array, **options: Any) -> Perturbation:
    """SSAM's mask; the dynamic one if ``drop`` is given."""
    choice: Any = "dynamic" if "drop" in options else "fisher"
    return sam_optax.sparsify(**options, choice=choice, key=key)


def of_momentum(make: Callable[..., Perturbation]) -> Callable[..., Optimizer]:
    """The base optimizer, driven by the perturbation along its momentum."""
    return lambda base, key, **options: base.sharp(
        sam_optax.momentum_start(make(**options), base.decay)
    )


def ahead(make: Callable[..., Perturbation]) -> Callable[..., Perturbation]:
    """A perturbation in the opposite direction."""
    return lambda **options: optax.chain(make(**options), optax.scale(-1.0))


def sam(base: Base, key: jax.Array, rho: float, **_: Any) -> Optimizer:
    """SAM, also for steps with a separate ascent gradient."""
    return base.sharp(sam_optax.sam(rho))


def gsam(base: Base, key: jax.Array, alpha: float, lr_max: float, **rho: float) -> Optimizer:
    """GSAM, with a radius that follows the learning rate."""
    radius = sam_optax.rho_from_learning_rate(base.learning_rate, lr_min=0, lr_max=lr_max, **rho)
    return base.sharp(sam_optax.sam(radius), sam_optax.surrogate_gap(alpha))


def rgsam(base: Base, key: jax.Array, alpha: float, **options: Any) -> Optimizer:
    """GSAM from a random start."""
    return base.sharp(sam_optax.rsam(**options, key=key), sam_optax.surrogate_gap(alpha))


def looksam(base: Base, key: jax.Array, rho: float, k: int, alpha: float) -> Optimizer:
    """LookSAM."""
    reuse = sam_optax.reuse_orthogonal(alpha)
    return base.sharp(sam_optax.sam(rho), reuse, when=sam_optax.every(k))


def gc_sam(base: Base, key: jax.Array, rho: float) -> Optimizer:
    """Both gradients without their means over the inputs of each output, in Flax's layout."""

    def centred(x: jax.Array) -> jax.Array:
        return x - x.mean(range(x.ndim - 1), keepdims=True) if x.ndim > 1 else x

    centralize = optax.stateless(lambda g, _: jax.tree.map(centred, g))
    return base.sharp(optax.chain(centralize, sam_optax.sam(rho)), centralize)


def xsam(base: Base, key: jax.Array, rho: float, every: int) -> Optimizer:
    """XSAM, whose search has the radius of the perturbation."""
    return base.sharp(sam_optax.sam(rho), sam_optax.toward_maximum(rho, every))


def ada_sam(base: Base, key: jax.Array, rho: float, lr: float) -> Optimizer:
    """AdaSAM: AMSGrad as the base optimizer."""
    return base.replaced(optax.amsgrad, lr).sharp(sam_optax.sam(rho))


def light_sam(base: Base, key: jax.Array, rho: float, lr: float) -> Optimizer:
    """LightSAM: AdaGrad, and ε divided by AdaGrad's accumulator of the ascent gradients."""
    adagrad = base.replaced(lambda rate: optax.adagrad(rate, _START_OF_SUM, eps=0.0), lr)
    return adagrad.sharp(optax.chain(optax.scale_by_rss(_START_OF_SUM, 0.0), optax.scale(rho)))


_START_OF_SUM = 1e-8


def b_sam(
    base: Base, key: jax.Array, rho: float, lr: float, beta1: float, beta2: float
) -> Optimizer:
    """bSAM, whose descent divides by the precision of its perturbation."""
    prior = {"data_size": base.examples, "weight_decay": base.weight_decay}
    pieces = optax.add_decayed_weights(base.weight_decay), optax.ema(beta1, debias=False)
    descent = optax.chain(*pieces, sam_optax.scale_by_precision())
    scale = optax.scale_by_learning_rate(lambda step: lr * base.learning_rate(step))
    bsam = sam_optax.bsam(rho, **prior, decay=beta2, key=key)
    return base._replace(make=lambda _: scale).sharp(bsam, descent)


def lookbehind(base: Base, key: jax.Array, rho: float, k: int, alpha: float) -> Optimizer:
    """Lookbehind-SAM; the learning rate follows the training steps, each with k of the base."""
    tx = base.make(lambda count: base.learning_rate(count // k))
    return sam_optax.lookbehind(tx, sam_optax.sam(rho), k, alpha)


def sampa(base: Base, key: jax.Array, rho: float, lmbda: float) -> Optimizer:
    """SAMPa, on one device."""
    return sam_optax.simultaneous(base.tx, sam_optax.sam(rho), lmbda)


def polyak(base: Base, key: jax.Array, rho: float, largest: float) -> Optimizer:
    """SAM with Polyak's step size, in place of the base optimizer."""
    return base._replace(make=lambda _: optax.polyak_sgd(largest)).sharp(sam_optax.sam(rho))


def weighted(gamma: float) -> Optimizer:
    """WSAM's descent, coupled."""
    return sam_optax.mix_gradients(_odds(gamma))


def wsam_decoupled(base: Base, key: jax.Array, rho: float, gamma: float) -> Optimizer:
    """WSAM, decoupled."""
    around = sam_optax.decoupled_sharpness(base.tx, base.learning_rate, _odds(gamma))
    return base._replace(make=lambda _: optax.identity()).sharp(sam_optax.sam(rho), around)


def _odds(gamma: float) -> float:
    if not 0 <= gamma < 1:
        raise ValueError(f"gamma must be in [0, 1), got {gamma!r}.")
    return gamma / (1 - gamma)


def esam(base: Base, key: jax.Array, rho: float, beta: float, fraction: float) -> Optimizer:
    """ESAM's random mask; :func:`rising` is its other half."""
    return base.sharp(optax.chain(sam_optax.sam(rho), sam_optax.random_mask(beta, key=key)))
