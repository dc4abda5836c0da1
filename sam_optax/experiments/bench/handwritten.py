"""Hand-written training steps, each for one method, from its paper.

They are what an expert would write for a training script that needs only this method: plain JAX,
SGD with momentum, no library. The library's steps are compared with them.

Each function takes the loss and returns ``(init, step)``: ``init(params)`` returns the state, and
``step(params, state, batch)`` the new params, the new state and the loss of the first forward pass
(``None`` if the method does not compute it).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath

from sam_optax.experiments.types import PyTree

LEARNING_RATE = 1e-3
MOMENTUM = 0.9
RHO = 0.05
FRACTION = 0.125
"""Share of the batch on which ``part`` takes its ascent gradient."""

Loss = Callable[[optax.Params, PyTree], jax.Array]
Perturb = Callable[[optax.Params, optax.Updates], optax.Params]


class Step(NamedTuple):
    """A training step and its initial state."""

    init: Callable[[optax.Params], PyTree]
    step: Callable[[optax.Params, PyTree, PyTree], tuple[optax.Params, PyTree, jax.Array | None]]


def sgd(loss: Loss) -> Step:
    """SGD with momentum: the base optimizer of every method."""

    def step(params: optax.Params, momentum: optax.Updates, batch: PyTree) -> PyTree:
        value, grads = jax.value_and_grad(loss)(params, batch)
        return *descend(params, momentum, grads), value

    return Step(zeros, step)


def sam(loss: Loss, rho: float = RHO) -> Step:
    """SAM: ε = ρ g/‖g‖."""
    return _with_both_gradients(loss, lambda params, grads: along(params, grads, rho))


def asam(loss: Loss, rho: float = 0.5, eta: float = 0.01) -> Step:
    """ASAM: ε = ρ T² g/‖T g‖, T = |w| + η for weights and 1 for biases."""

    def scaling(path: KeyPath, w: jax.Array) -> jax.Array:
        return jnp.ones_like(w) if path[-1].key == "bias" else jnp.abs(w) + eta

    def perturb(params: optax.Params, grads: optax.Updates) -> optax.Params:
        return scaled(params, grads, jax.tree_util.tree_map_with_path(scaling, params), rho)

    return _with_both_gradients(loss, perturb)


def fisher_sam(loss: Loss, rho: float = RHO, eta: float = 1.0) -> Step:
    """Fisher SAM: ε = ρ T² g/‖T g‖ with T² = 1/(1 + η g²)."""

    def perturb(params: optax.Params, grads: optax.Updates) -> optax.Params:
        scaling = jax.tree.map(lambda g: jax.lax.rsqrt(1 + eta * g**2), grads)
        return scaled(params, grads, scaling, rho)

    return _with_both_gradients(loss, perturb)


def gsam(loss: Loss, rho: float = RHO, alpha: float = 0.4) -> Step:
    """GSAM: g_s − α g_⊥ with g_⊥ = g − ⟨g, g_s⟩/‖g_s‖² g_s."""

    def combine(grads: optax.Updates, sharp: optax.Updates) -> PyTree:
        products = jax.tree.map(lambda g, s: jnp.sum(g * s), grads, sharp)
        share = jax.tree.reduce(jnp.add, products) / guarded_norm(sharp) ** 2
        return jax.tree.map(lambda g, s: s - alpha * (g - share * s), grads, sharp)

    return _with_both_gradients(loss, lambda params, grads: along(params, grads, rho), combine)


def _with_both_gradients(
    loss: Loss,
    perturb: Perturb,
    combine: Callable[[optax.Updates, optax.Updates], optax.Updates] = lambda grads, sharp: sharp,
) -> Step:
    """The step of methods without a state: descent along the gradient at the perturbed params."""

    def step(params: optax.Params, momentum: optax.Updates, batch: PyTree) -> PyTree:
        value, grads = jax.value_and_grad(loss)(params, batch)
        sharp = jax.grad(loss)(perturb(params, grads), batch)
        return *descend(params, momentum, combine(grads, sharp)), value

    return Step(zeros, step)


def fsam(loss: Loss, rho: float = 0.1, sigma: float = 1.0, lmbda: float = 0.9) -> Step:
    """F-SAM: d = g − σ m, ε = ρ d/‖d‖, m ← λ m + (1 − λ) g, with m = g after the first step."""

    def init(params: optax.Params) -> PyTree:
        return zeros(params), jnp.zeros((), jnp.int32), zeros(params)

    def step(params: optax.Params, state: optax.OptState, batch: PyTree) -> PyTree:
        ema, count, momentum = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        residual = jax.tree.map(lambda g, m: g - sigma * m, grads, ema)
        ema = jax.tree.map(
            lambda g, m: jnp.where(count == 0, g, lmbda * m + (1 - lmbda) * g), grads, ema
        )
        sharp = jax.grad(loss)(along(params, residual, rho), batch)
        params, momentum = descend(params, momentum, sharp)
        return params, (ema, count + 1, momentum), value

    return Step(init, step)


def rsam(loss: Loss, rho: float = RHO, gamma: float = 0.1, lmbda: float = 2.0) -> Step:
    """R-SAM: ĝ = ∇L(w + δ), ε along δ/‖δ‖ + λĝ/‖ĝ‖, with δ drawn by ``jax.random.normal``."""

    def draw(w: jax.Array, key: jax.Array) -> jax.Array:
        axes = tuple(range(w.ndim - 1)) if w.ndim > 1 else None
        rms = jnp.sqrt(jnp.mean(jnp.square(w), axis=axes, keepdims=True))
        return gamma * rms * jax.random.normal(key, w.shape, w.dtype)

    def step(params: optax.Params, state: optax.OptState, batch: PyTree) -> PyTree:
        key, momentum = state
        key, noise_key = jax.random.split(key)
        leaves, structure = jax.tree.flatten(params)
        keys = jax.tree.unflatten(structure, list(jax.random.split(noise_key, len(leaves))))
        delta = jax.tree.map(draw, params, keys)
        grads = jax.grad(loss)(jax.tree.map(jnp.add, params, delta), batch)
        by_delta, by_grads = 1 / guarded_norm(delta), lmbda / guarded_norm(grads)
        direction = jax.tree.map(lambda d, g: by_delta * d + by_grads * g, delta, grads)
        sharp = jax.grad(loss)(along(params, direction, rho), batch)
        params, momentum = descend(params, momentum, sharp)
        return params, (key, momentum), None

    return Step(lambda params: (jax.random.key(0), zeros(params)), step)


def part(loss: Loss, rho: float = RHO, fraction: float = FRACTION) -> Step:
    """SAM with the ascent gradient on evenly spaced examples."""

    def step(params: optax.Params, momentum: optax.Updates, batch: PyTree) -> PyTree:
        few = jax.tree.map(lambda leaf: leaf[:: round(1 / fraction)], batch)
        grads = jax.grad(loss)(params, few)
        sharp = jax.grad(loss)(along(params, grads, rho), batch)
        return *descend(params, momentum, sharp), None

    return Step(zeros, step)


def momentum(loss: Loss, rho: float = RHO) -> Step:
    """The gradient at w + ρ m/‖m‖, with the momentum m of SGD."""

    def step(params: optax.Params, momentum: optax.Updates, batch: PyTree) -> PyTree:
        value, grads = jax.value_and_grad(loss)(along(params, momentum, rho), batch)
        return *descend(params, momentum, grads), value

    return Step(zeros, step)


_METHODS = sgd, sam, asam, fsam, rsam, gsam, fisher_sam, part, momentum
HANDWRITTEN: dict[str, Callable[[Loss], Step]] = {step.__name__: step for step in _METHODS}
"""Hand-written steps by the method's name in the registry; arguments are its hyperparameters."""


def zeros(params: optax.Params) -> PyTree:
    """The initial state of the base optimizer."""
    return jax.tree.map(jnp.zeros_like, params)


def guarded_norm(tree: PyTree) -> jax.Array:
    """‖·‖₂ of a tree, or 1 if it is 0."""
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))
    return jnp.where(norm > 0, norm, 1.0)


def along(params: optax.Params, direction: optax.Updates, rho: float) -> optax.Params:
    """W + ρ d/‖d‖."""
    scale = rho / guarded_norm(direction)
    return jax.tree.map(lambda w, d: w + scale * d, params, direction)


def scaled(
    params: optax.Params, grads: optax.Updates, scaling: optax.Updates, rho: float
) -> optax.Params:
    """W + ρ T² g/‖T g‖."""
    products = jax.tree.map(jnp.multiply, scaling, grads)
    scale = rho / guarded_norm(products)
    return jax.tree.map(lambda w, t, tg: w + scale * t * tg, params, scaling, products)


def descend(
    params: optax.Params, momentum: optax.Updates, grads: optax.Updates
) -> tuple[optax.Params, optax.Updates]:
    """A step of the base optimizer with the gradient at the perturbed params."""
    momentum = jax.tree.map(lambda m, g: MOMENTUM * m + g, momentum, grads)
    return jax.tree.map(lambda w, m: w - LEARNING_RATE * m, params, momentum), momentum
