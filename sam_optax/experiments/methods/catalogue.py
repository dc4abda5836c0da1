# ruff: noqa: D103 (the papers' Greek letters, in help texts; a title says what each is)
"""Methods that are known by their paper's name alone.

The learning rates of those with their own base optimizer had the highest accuracy on held-out
examples among four.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import sam_optax
from sam_optax.experiments.methods.method import Arguments, Base, Optimizer, Step, method
from sam_optax.experiments.types import PyTree

_START_OF_SUM = 1e-8


@method("LE-SAM", radius=("rho", "tau"))
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


@method("ZSharp", weight_decay=0.0015)
def zsharp(base: Base, rho: float = 0.5, quantile: float = 0.95) -> Optimizer:
    return base.sharp(optax.chain(sam_optax.zscore_filter(quantile), sam_optax.sam(rho)))


@method(
    "Lookbehind-SAM",
    gradients=lambda _, k, **__: 1 + k,
    arguments=lambda step, **_: {"grad_fn": step.grad_fn(step.batch)},
)
def lookbehind(base: Base, rho: float = 0.25, k: int = 2, alpha: float = 0.5) -> Optimizer:
    """The learning rate follows the training steps, each with k of the base."""
    tx = base.make(lambda count: base.learning_rate(count // k))
    return sam_optax.lookbehind(tx, sam_optax.sam(rho), k, alpha)


@method("XSAM", arguments=lambda step, **_: {"value_fn": step.loss_fn(step.batch)})
def xsam(base: Base, rho: float = 0.5, every: int = 100) -> Optimizer:
    """Its search has the radius of the perturbation."""
    return base.sharp(sam_optax.sam(rho), sam_optax.toward_maximum(rho, every))


def _eigenvector(step: Step, iterations: int, **_: Any) -> Arguments:
    """The Hessian's leading eigenvector on the batch, by power iteration.

    It starts at the gradient, so that the vector's sign is the gradient's.
    """
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations!r}.")
    grad_fn = step.grad_fn(step.batch)

    def iteration(_: int, v: PyTree) -> PyTree:
        product = jax.jvp(grad_fn, (step.params,), (v,))[1]
        norm = optax.tree.norm(product)
        return jax.tree.map(lambda leaf: leaf / jnp.where(norm == 0, 1, norm), product)

    v = jax.lax.fori_loop(0, iterations, iteration, grad_fn(step.params))
    return {"grad_fn": grad_fn, "eigenvector": v}


@method("X-SAM", gradients=lambda _, iterations, **__: 2 + 2 * iterations, arguments=_eigenvector)
def x_sam(base: Base, rho: float = 0.25, alpha: float = 0.5, iterations: int = 5) -> Optimizer:
    return base.sharp(sam_optax.sam(rho), sam_optax.away_from_eigenvector(alpha))


def _steepness(step: Step, rho: float, alpha: float, **_: Any) -> Arguments:
    """GAM's gradients of the gradient's norm, and of the loss."""
    grad_fn = step.grad_fn(step.batch)
    ascent = jax.grad(lambda params: optax.tree.norm(grad_fn(params)))

    def sharp(params: optax.Params) -> PyTree:
        parts = grad_fn(step.params), ascent(params)
        return jax.tree.map(lambda g, f: g + alpha * rho * f, *parts)

    return {"grad_fn": sharp, "ascent_grad_fn": ascent}


# Two of its gradients are products with the Hessian.
@method("GAM", gradients=5, arguments=_steepness, weight_decay=5.56e-05)
def gam(base: Base, rho: float = 0.5, alpha: float = 1.0) -> Optimizer:
    return base.sharp(sam_optax.sam(rho))


def _two_batches(step: Step, **_: Any) -> Arguments:
    return {"grad_fn": step.grad_fn(step.batch), "previous_grad_fn": step.grad_fn(step.previous)}


@method("SAMPa", arguments=_two_batches, needs_previous=True, weight_decay=0.0015)
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


def _linearized_back(step: Step, **_: Any) -> Arguments:
    """The loss at w, from loss and gradient at w + ε."""

    def value_and_grad_fn(params: optax.Params) -> PyTree:
        (value, aux), grads = step.value_and_grad_fn(params)
        eps = jax.tree.map(jnp.subtract, params, step.params)
        return (jnp.maximum(value - optax.tree.vdot(grads, eps), 0), aux), grads

    ascent = step.grad_fn(step.batch)
    return {"value_and_grad_fn": value_and_grad_fn, "ascent_grad_fn": ascent}


@method("SAM-Polyak", arguments=_linearized_back, decays=False)
def sam_polyak(base: Base, rho: float = 0.25, largest: float = 0.3) -> Optimizer:
    """Polyak's step size, in place of the base optimizer."""
    return base._replace(make=lambda _: optax.polyak_sgd(largest)).sharp(sam_optax.sam(rho))


@method("bSAM", decays=False)  # the weight decay is the prior's precision, and has to be a number
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
