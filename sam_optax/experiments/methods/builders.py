"""Builders of the methods in the registry, and further arguments of their steps."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

import sam_optax
from sam_optax.experiments.methods.method import Base, Step

Perturbation: TypeAlias = optax.GradientTransformation
Optimizer: TypeAlias = optax.GradientTransformation


def built(make: Callable[..., Perturbation]) -> Callable[..., Optimizer]:
    """The base optimizer driven by the perturbation ``make(key, **hyperparameters)``."""
    return lambda base, key, **options: base.sharp(make(key, **options))


def keyless(make: Callable[..., Perturbation]) -> Callable[..., Perturbation]:
    """A perturbation without randomness."""
    return lambda key, **options: make(**options)


def keyed(make: Callable[..., Perturbation]) -> Callable[..., Perturbation]:
    """A perturbation that takes a key."""
    return lambda key, **options: make(**options, key=key)


def friendly(make: Callable[..., Perturbation]) -> Callable[..., Perturbation]:
    """A perturbation along the gradient without its full-gradient component."""

    def build(key: Any, sigma: float, lmbda: float, **options: Any) -> Perturbation:
        return optax.chain(sam_optax.remove_full_gradient(sigma, lmbda), make(**options))

    return build


def asam(
    key: Any,
    rho: float,
    eta: float,
    p: float | str = 2,
    normalization: Any = "elementwise",
    normalize_biases: bool = False,
) -> Perturbation:
    """ASAM; an infinite p may be text, as in results, and biases are found by their names."""
    biases = False if normalize_biases else None
    return sam_optax.asam(rho, eta, p=float(p), normalization=normalization, bias_mask=biases)


def sparse(key: Any, **options: Any) -> Perturbation:
    """SSAM's mask; the dynamic one if ``drop`` is given."""
    choice: Any = "dynamic" if "drop" in options else "fisher"
    return sam_optax.sparsify(**options, choice=choice, key=key)


def ahead(perturbation: Perturbation, decay: float) -> Perturbation:
    """A perturbation along past gradients, in the direction of the next update."""
    return sam_optax.momentum_start(optax.chain(perturbation, optax.scale(-1.0)), decay)


def sam(base: Base, key: Any, rho: float, **_: Any) -> Optimizer:
    """SAM, also for steps with a separate ascent gradient."""
    return base.sharp(sam_optax.sam(rho))


def gsam(base: Base, key: Any, alpha: float, lr_max: float, **rho: float) -> Optimizer:
    """GSAM, with a radius that follows the learning rate."""
    radius = sam_optax.rho_from_learning_rate(base.learning_rate, lr_min=0, lr_max=lr_max, **rho)
    return base.sharp(sam_optax.sam(radius), sam_optax.surrogate_gap(alpha))


def rgsam(base: Base, key: Any, alpha: float, **options: Any) -> Optimizer:
    """GSAM from a random start."""
    return base.sharp(sam_optax.rsam(**options, key=key), sam_optax.surrogate_gap(alpha))


def looksam(base: Base, key: Any, rho: float, k: int, alpha: float) -> Optimizer:
    """LookSAM."""
    reuse = sam_optax.reuse_orthogonal(alpha)
    return base.sharp(sam_optax.sam(rho), reuse, when=sam_optax.every(k))


def every(base: Base, key: Any, rho: float, k: int) -> Optimizer:
    """SAM at every k-th step."""
    return base.sharp(sam_optax.sam(rho), when=sam_optax.every(k))


def ss_sam(base: Base, key: Any, rho: float, p: float) -> Optimizer:
    """SAM at random steps."""
    return base.sharp(sam_optax.sam(rho), when=sam_optax.bernoulli(p, key=key))


def stable_sam(base: Base, key: Any, rho: float) -> Optimizer:
    """The sharp gradient at the length of the ascent gradient."""
    return base.sharp(sam_optax.sam(rho), sam_optax.match_ascent_norm())


def gc_sam(base: Base, key: Any, rho: float) -> Optimizer:
    """Both gradients without their means."""
    perturbation = optax.chain(optax.centralize(), sam_optax.sam(rho))
    return base.sharp(perturbation, optax.centralize())


def ae_sam(base: Base, key: Any, rho: float, c: float, decay: float) -> Optimizer:
    """SAM at steps with a large gradient."""
    return base.sharp(sam_optax.sam(rho), when=sam_optax.above_average(c, decay))


def xsam(base: Base, key: Any, rho: float, every: int) -> Optimizer:
    """XSAM, whose search has the radius of the perturbation."""
    return base.sharp(sam_optax.sam(rho), sam_optax.toward_maximum(rho, every))


def value(step: Step, **_: Any) -> dict[str, Any]:
    """The loss on the batch."""
    return {"value_fn": lambda params: jnp.mean(step.losses_fn(params, step.batch))}


def lookbehind(step: Step, rho: float, k: int) -> dict[str, Any]:
    """The mean gradient along the ascent."""
    grad_fn = step.grad_fn(step.batch)
    mean = sam_optax.lookbehind(grad_fn, sam_optax.sam(rho), k)
    return {"grad_fn": mean, "ascent_grad_fn": grad_fn}


def wsam(base: Base, key: Any, rho: float, gamma: float) -> Optimizer:
    """WSAM, coupled."""
    return base.sharp(sam_optax.sam(rho), sam_optax.mix_gradients(_odds(gamma)))


def wsam_decoupled(base: Base, key: Any, rho: float, gamma: float) -> Optimizer:
    """WSAM, decoupled."""
    tx = sam_optax.decoupled_sharpness(base.tx, base.learning_rate, _odds(gamma))
    return base._replace(tx=tx).sharp(sam_optax.sam(rho))


def _odds(gamma: float) -> float:
    if not 0 <= gamma < 1:
        raise ValueError(f"gamma must be in [0, 1), got {gamma!r}.")
    return gamma / (1 - gamma)


def esam(base: Base, key: Any, rho: float, beta: float, fraction: float) -> Optimizer:
    """ESAM's random mask; :func:`rising` is its other half."""
    return base.sharp(optax.chain(sam_optax.sam(rho), sam_optax.random_mask(beta, key=key)))


def rising(step: Step, fraction: float, **_: Any) -> dict[str, Any]:
    """The sharp gradient on the examples whose loss rises most."""
    rising = sam_optax.rising_samples(step.losses_fn, step.params, step.batch, fraction)
    return {"grad_fn": rising, "ascent_grad_fn": step.grad_fn(step.batch)}


def reweighted(step: Step, **_: Any) -> dict[str, Any]:
    """The ascent gradient of δ-SAM."""
    ascent = sam_optax.reweighted_ascent(step.losses_fn, step.batch, key=step.key)
    return {"ascent_grad_fn": ascent}


def part(step: Step, fraction: float, **_: Any) -> dict[str, Any]:
    """The ascent gradient on part of the batch."""
    return {"ascent_grad_fn": step.grad_fn(sam_optax.part_of_batch(step.batch, fraction))}


def whole(step: Step, **_: Any) -> dict[str, Any]:
    """The ascent gradient on all data."""
    return {"ascent_grad_fn": step.full_grad_fn}


def another_batch(step: Step, **_: Any) -> dict[str, Any]:
    """The ascent gradient on a batch of other examples, which are not augmented."""
    examples, size = len(step.data[1]), len(step.batch[1])
    index = jax.random.choice(step.key, examples, (size,), replace=False)
    batch = jax.tree.map(lambda leaf: jnp.asarray(leaf)[index], step.data)
    return {"ascent_grad_fn": step.grad_fn(batch)}


def several_batches(step: Step, batches: int, **_: Any) -> dict[str, Any]:
    """The ascent gradient on the batch and on others, which are not augmented; at most all data."""
    if batches < 1:
        raise ValueError(f"batches must be at least 1, got {batches!r}.")
    examples, size = len(step.data[1]), len(step.batch[1])
    if batches == 1:
        return {}
    if batches * size >= examples:
        return whole(step)
    index = jax.random.choice(step.key, examples, (batches - 1, size), replace=False)

    def of_another(params: Any, i: jax.Array) -> Any:
        batch = jax.tree.map(lambda leaf: jnp.asarray(leaf)[index[i]], step.data)
        return step.grad_fn(batch)(params)

    others = sam_optax.accumulate(of_another, batches - 1)

    def mean(params: Any) -> Any:
        grads = step.grad_fn(step.batch)(params), others(params)
        return jax.tree.map(lambda g, rest: (g + (batches - 1) * rest) / batches, *grads)

    return {"ascent_grad_fn": mean}


def full_gradient(step: Step, **_: Any) -> dict[str, Any]:
    """The gradient on all data."""
    return {"full_grads": step.full_grad_fn(step.params)}
