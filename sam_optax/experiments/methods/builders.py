"""How the methods of the comparison are built, and what else their steps take.

A builder is called as ``(base, key, **hyperparameters)`` and returns the optimizer; arguments of a
step are made by ``(step, **hyperparameters)``: see
:class:`~sam_optax.experiments.methods.method.Method`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import sam_optax
from sam_optax.experiments.methods.method import Base, Step


def simple(make: Any) -> Any:
    """The builder of a perturbation that knows of neither base optimizer nor key."""
    return lambda base, key, **options: base.sharp(make(**options))


def keyed(make: Any) -> Any:
    """The builder of a perturbation that takes a key."""
    return lambda base, key, **options: base.sharp(make(**options, key=key))


def friendly(make: Any) -> Any:
    """The builder of a perturbation of the gradient without its full-gradient component."""

    def build(base: Base, key: Any, sigma: float, lmbda: float, **options: Any) -> Any:
        del key
        pieces = sam_optax.remove_full_gradient(sigma, lmbda), make(**options)
        return base.sharp(optax.chain(*pieces))

    return build


def sgd(base: Base, key: Any) -> optax.GradientTransformation:
    """The base optimizer."""
    del key
    return base.tx


def gsam(base: Base, key: Any, alpha: float, lr_max: float, **rho: float) -> Any:
    """GSAM, its radius tied to the learning rate."""
    del key
    radius = sam_optax.rho_from_learning_rate(base.learning_rate, lr_min=0, lr_max=lr_max, **rho)
    return base.sharp(sam_optax.sam(radius), sam_optax.surrogate_gap(alpha))


def rgsam(base: Base, key: Any, alpha: float, **options: Any) -> Any:
    """GSAM from a random start."""
    return base.sharp(sam_optax.rsam(**options, key=key), sam_optax.surrogate_gap(alpha))


def looksam(base: Base, key: Any, rho: float, k: int, alpha: float) -> Any:
    """LookSAM."""
    del key
    reuse = sam_optax.reuse_orthogonal(alpha)
    return base.sharp(sam_optax.sam(rho), reuse, when=sam_optax.every(k))


def every(base: Base, key: Any, rho: float, k: int) -> Any:
    """SAM at every k-th step."""
    del key
    return base.sharp(sam_optax.sam(rho), when=sam_optax.every(k))


def ss_sam(base: Base, key: Any, rho: float, p: float) -> Any:
    """SAM at random steps."""
    when = sam_optax.bernoulli(p, key=key)
    return base.sharp(sam_optax.sam(rho), when=when)


def vasso(base: Base, key: Any, rho: float, theta: float) -> Any:
    """SAM along smoothed gradients."""
    del key
    pieces = sam_optax.smooth_gradient(theta), sam_optax.sam(rho)
    return base.sharp(optax.chain(*pieces))


def ssam(base: Base, key: Any, rho: float, **options: Any) -> Any:
    """Sparse SAM; with ``drop`` its mask is the dynamic one."""
    choice: Any = "dynamic" if "drop" in options else "fisher"
    mask = sam_optax.sparsify(**options, choice=choice, key=key)
    return base.sharp(optax.chain(sam_optax.sam(rho), mask))


def esam(base: Base, key: Any, rho: float, beta: float, fraction: float) -> Any:
    """ESAM's random mask; :func:`rising` is its other half."""
    del fraction
    pieces = sam_optax.sam(rho), sam_optax.random_mask(beta, key=key)
    return base.sharp(optax.chain(*pieces))


def rising(step: Step, fraction: float, **_: Any) -> dict[str, Any]:
    """The sharp gradient on the examples whose loss rises most."""
    rising = sam_optax.rising_samples(step.losses_fn, step.params, step.batch, fraction)
    return {"grad_fn": rising, "ascent_grad_fn": step.grad_fn(step.batch)}


def reweighted(step: Step, **_: Any) -> dict[str, Any]:
    """The ascent gradient of δ-SAM."""
    ascent = sam_optax.reweighted_ascent(step.losses_fn, step.batch, key=step.key)
    return {"ascent_grad_fn": ascent}


def sam(base: Base, key: Any, rho: float, **_: Any) -> Any:
    """SAM, for steps with an ascent gradient of their own."""
    del key
    return base.sharp(sam_optax.sam(rho))


def part(step: Step, fraction: float, **_: Any) -> dict[str, Any]:
    """The ascent gradient on part of the batch."""
    return {"ascent_grad_fn": step.grad_fn(sam_optax.part_of_batch(step.batch, fraction))}


def whole(step: Step, **_: Any) -> dict[str, Any]:
    """The ascent gradient on all data."""
    return {"ascent_grad_fn": step.full_grad_fn}


def another_batch(step: Step, **_: Any) -> dict[str, Any]:
    """The ascent gradient on a batch of other examples."""
    examples, size = len(step.data[1]), len(step.batch[1])
    index = jax.random.choice(step.key, examples, (size,), replace=False)
    batch = jax.tree.map(lambda leaf: jnp.asarray(leaf)[index], step.data)
    return {"ascent_grad_fn": step.grad_fn(batch)}


def noise_of_batch(base: Base, key: Any, rho: float) -> Any:
    """SAM off the full gradient, which :func:`full_gradient` gives."""
    del key
    pieces = sam_optax.project_out(), sam_optax.sam(rho)
    return base.sharp(optax.chain(*pieces))


def full_gradient(step: Step, **_: Any) -> dict[str, Any]:
    """The gradient on all data."""
    return {"full_grads": step.full_grad_fn(step.params)}


def momentum(base: Base, key: Any, rho: float, decay: float) -> Any:
    """Ascent along past gradients."""
    del key
    return base.sharp(sam_optax.momentum_start(sam_optax.sam(rho), decay))


def msam(base: Base, key: Any, rho: float, decay: float) -> Any:
    """Momentum-SAM."""
    del key
    return _ahead(base, sam_optax.sam(rho), decay)


def m_asam(base: Base, key: Any, rho: float, eta: float, decay: float) -> Any:
    """Momentum-SAM with ASAM's normalization."""
    del key
    return _ahead(base, sam_optax.asam(rho, eta), decay)


def _ahead(base: Base, perturbation: Any, decay: float) -> Any:
    ahead = optax.chain(perturbation, optax.scale(-1.0))
    return base.sharp(sam_optax.momentum_start(ahead, decay))


def wsam(base: Base, key: Any, rho: float, gamma: float) -> Any:
    """WSAM, coupled."""
    del key
    return base.sharp(sam_optax.sam(rho), sam_optax.mix_gradients(_odds(gamma)))


def wsam_decoupled(base: Base, key: Any, rho: float, gamma: float) -> Any:
    """WSAM, decoupled."""
    del key
    tx = sam_optax.decoupled_sharpness(base.tx, base.learning_rate, _odds(gamma))
    return base._replace(tx=tx).sharp(sam_optax.sam(rho))


def _odds(gamma: float) -> float:
    if not 0 <= gamma < 1:
        raise ValueError(f"gamma must be in [0, 1), got {gamma!r}.")
    return gamma / (1 - gamma)
