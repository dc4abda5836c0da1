"""Hand-written training steps, each for one method, from its paper.

They are what an expert would write for a training script that needs only this method: plain JAX and
the base optimizer. The library's steps are compared with them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sam_optax.experiments.types import Function, PyTree

Loss = Callable[[optax.Params, PyTree], jax.Array]


class Step(NamedTuple):
    """``step(params, state, batch)`` returns params, state and the first pass's loss, if any."""

    init: Callable[[optax.Params], PyTree]
    step: Callable[[optax.Params, PyTree, PyTree], tuple[optax.Params, PyTree, jax.Array | None]]


class At(NamedTuple):
    """What a method's step starts from; ``state`` is the method's own."""

    params: optax.Params
    state: PyTree
    base_state: optax.OptState
    batch: PyTree
    value_and_grad: Function  # (params, batch = this one) -> loss, gradient
    mean: Function  # over the devices


def sgd(at: At) -> PyTree:
    """The base optimizer alone."""
    return *at.value_and_grad(at.params), ()


def sam(at: At, rho: float) -> PyTree:
    """SAM: ε = ρ g/‖g‖."""
    value, grads = at.value_and_grad(at.params)
    return value, at.value_and_grad(along(at.params, grads, rho))[1], ()


def asam(at: At, rho: float, eta: float) -> PyTree:
    """ASAM: ε = ρ T² g/‖T g‖, T = |w| + η for weights and 1 for biases."""

    def scaling(path: jax.tree_util.KeyPath, w: jax.Array) -> jax.Array:
        return jnp.ones_like(w) if path[-1].key == "bias" else jnp.abs(w) + eta

    value, grads = at.value_and_grad(at.params)
    scales = jax.tree_util.tree_map_with_path(scaling, at.params)
    products = jax.tree.map(jnp.multiply, scales, grads)
    scale = rho / guarded_norm(products)
    perturbed = jax.tree.map(lambda w, t, tg: w + scale * t * tg, at.params, scales, products)
    return value, at.value_and_grad(perturbed)[1], ()


def fsam(at: At, rho: float, sigma: float, lmbda: float) -> PyTree:
    """F-SAM: d = g − σ m, ε = ρ d/‖d‖, m ← λ m + (1 − λ) g, with m = g after the first step."""
    ema, count = at.state
    value, grads = at.value_and_grad(at.params)
    residual = jax.tree.map(lambda g, m: g - sigma * m, grads, ema)
    weight = jnp.where(count == 0, 0.0, lmbda)
    ema = jax.tree.map(lambda g, m: weight * m + (1 - weight) * g, at.mean(grads), ema)
    return value, at.value_and_grad(along(at.params, residual, rho))[1], (ema, count + 1)


def rsam(at: At, rho: float, gamma: float, lmbda: float) -> PyTree:
    """R-SAM: d = δ/‖δ‖ + λ g/‖g‖, ε = ρ d/‖d‖, with g at w + δ and δ ~ N(0, γ² ‖w_j‖²/n_j)."""

    def draw(w: jax.Array, key: jax.Array) -> jax.Array:
        axes = tuple(range(w.ndim - 1)) if w.ndim > 1 else None
        rms = jnp.sqrt(jnp.mean(jnp.square(w), axis=axes, keepdims=True))
        return gamma * rms * jax.random.normal(key, w.shape, w.dtype)

    next_key, key = jax.random.split(at.state)
    keys = optax.tree_utils.tree_split_key_like(key, at.params)
    delta = jax.tree.map(draw, at.params, keys)
    _, grads = at.value_and_grad(jax.tree.map(jnp.add, at.params, delta))
    by_delta, by_grads = 1 / guarded_norm(delta), lmbda / guarded_norm(grads)
    direction = jax.tree.map(lambda d, g: by_delta * d + by_grads * g, delta, grads)
    return None, at.value_and_grad(along(at.params, direction, rho))[1], next_key


METHODS: dict[str, tuple[Function, Function]] = {
    "sgd": (sgd, lambda params: ()),
    "sam": (sam, lambda params: ()),
    "asam": (asam, lambda params: ()),
    "fsam": (fsam, lambda params: (jax.tree.map(jnp.zeros_like, params), jnp.zeros((), int))),
    "rsam": (rsam, lambda params: jax.random.key_data(jax.random.key(0))),
}
"""By name in the registry: loss, gradient and next state of a step; and the first state."""


def by_hand(method: Any, losses: Loss, base: Any, axis: str | None, **options: Any) -> Step:
    """The step of one of ``METHODS`` with its options; with ``axis``, the program of one device."""
    of, init = method

    def mean(tree: PyTree) -> PyTree:
        return tree if axis is None else jax.lax.pmean(tree, axis)

    def step(params: optax.Params, state: PyTree, batch: PyTree) -> Any:
        def value_and_grad(at: optax.Params, some: PyTree = batch) -> PyTree:
            return jax.value_and_grad(lambda w: jnp.mean(losses(w, some)))(at)

        own, base_state = state
        at = At(params, own, base_state, batch, value_and_grad, mean)
        value, grads, own = of(at, **options)
        updates, base_state = base.update(mean(grads), base_state, params)
        return optax.apply_updates(params, updates), (own, base_state), value

    return Step(lambda params: (init(params), base.init(params)), step)


def guarded_norm(tree: PyTree) -> jax.Array:
    """‖·‖₂ of a tree, or 1 if it is 0."""
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))
    return jnp.where(norm > 0, norm, 1.0)


def along(params: optax.Params, direction: optax.Updates, rho: float) -> optax.Params:
    """W + ρ d/‖d‖."""
    scale = rho / guarded_norm(direction)
    return jax.tree.map(lambda w, d: w + scale * d, params, direction)
