"""Hand-written training steps, each for one method, from its paper.

They are what an expert would write for a training script that needs only this method: plain JAX and
the base optimizer. The library's steps are compared with them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath

from sam_optax.experiments.types import Function, PyTree

Loss = Callable[[optax.Params, PyTree], jax.Array]


class Step(NamedTuple):
    """``step(params, state, batch)`` returns params, state and the first pass's loss, if any."""

    init: Callable[[optax.Params], PyTree]
    step: Callable[[optax.Params, PyTree, PyTree], tuple[optax.Params, PyTree, jax.Array | None]]


class At(NamedTuple):
    """What a method's step starts from."""

    params: optax.Params
    state: PyTree  # the method's own
    base_state: optax.OptState
    ascent: Function  # (params, stride of the examples = 1) -> (loss, gradient)
    sharp: Function  # params -> gradient
    mean: Function  # over the devices


def sgd(at: At) -> PyTree:
    """The base optimizer alone."""
    return *at.ascent(at.params), ()


def sam(at: At, rho: float) -> PyTree:
    """SAM: ε = ρ g/‖g‖."""
    value, grads = at.ascent(at.params)
    return value, at.sharp(along(at.params, grads, rho)), ()


def asam(at: At, rho: float, eta: float) -> PyTree:
    """ASAM: ε = ρ T² g/‖T g‖, T = |w| + η for weights and 1 for biases."""

    def scaling(path: KeyPath, w: jax.Array) -> jax.Array:
        return jnp.ones_like(w) if path[-1].key == "bias" else jnp.abs(w) + eta

    value, grads = at.ascent(at.params)
    scales = jax.tree_util.tree_map_with_path(scaling, at.params)
    products = jax.tree.map(jnp.multiply, scales, grads)
    scale = rho / guarded_norm(products)
    perturbed = jax.tree.map(lambda w, t, tg: w + scale * t * tg, at.params, scales, products)
    return value, at.sharp(perturbed), ()


def fsam(at: At, rho: float, sigma: float, lmbda: float) -> PyTree:
    """F-SAM: d = g − σ m, ε = ρ d/‖d‖, m ← λ m + (1 − λ) g, with m = g after the first step."""
    ema, count = at.state
    value, grads = at.ascent(at.params)
    residual = jax.tree.map(lambda g, m: g - sigma * m, grads, ema)
    weight = jnp.where(count == 0, 0.0, lmbda)
    ema = jax.tree.map(lambda g, m: weight * m + (1 - weight) * g, at.mean(grads), ema)
    return value, at.sharp(along(at.params, residual, rho)), (ema, count + 1)


def momentum(at: At, rho: float) -> PyTree:
    """The gradient at w + ρ m/‖m‖, with the momentum m of SGD (``trace``) or Adam (``mu``)."""
    kept = optax.tree.get(at.base_state, "trace", optax.tree.get(at.base_state, "mu"))
    return *at.ascent(along(at.params, kept, rho)), ()


HANDWRITTEN: dict[str, Function] = {
    method.__name__: method for method in (sgd, sam, asam, fsam, momentum)
}
"""By name in the registry, with its hyperparameters: loss, gradient and state of a step."""


def fsam_state(params: optax.Params) -> PyTree:
    """The average, and the number of steps."""
    return jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.int32)


def by_hand(
    method: Function,
    loss: Loss,
    base: optax.GradientTransformation,
    start: Function | None = None,
    axis: str | None = None,
    synchronized: bool = False,
) -> Step:
    """The step of a method; with ``axis``, the program of one device."""
    tx = optax.with_extra_args_support(base)

    def step(params: optax.Params, state: PyTree, batch: PyTree) -> PyTree:
        def mean(tree: PyTree) -> PyTree:
            return tree if axis is None else jax.lax.pmean(tree, axis)

        def ascent(params: optax.Params, stride: int = 1) -> PyTree:
            examples = jax.tree.map(lambda leaf: leaf[::stride], batch)
            value, grads = jax.value_and_grad(loss)(params, examples)
            return value, mean(grads) if synchronized else grads

        def sharp(params: optax.Params, *_: Any) -> optax.Updates:
            return jax.grad(loss)(params, batch)

        value, grads, own = method(At(params, state[0], state[1], ascent, sharp, mean))
        updates, base_state = tx.update(mean(grads), state[1], params, grad_fn=sharp)
        return optax.apply_updates(params, updates), (own, base_state), value

    return Step(lambda params: (start(params) if start else (), tx.init(params)), step)


def guarded_norm(tree: PyTree) -> jax.Array:
    """‖·‖₂ of a tree, or 1 if it is 0."""
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))
    return jnp.where(norm > 0, norm, 1.0)


def along(params: optax.Params, direction: optax.Updates, rho: float) -> optax.Params:
    """W + ρ d/‖d‖."""
    scale = rho / guarded_norm(direction)
    return jax.tree.map(lambda w, d: w + scale * d, params, direction)
