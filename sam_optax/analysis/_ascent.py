"""The largest rise of a loss within a normalized ball, found by projected gradient ascent."""

import functools
import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from jax import lax

import sam_optax
from sam_optax._internal import noise, trees, vectors
from sam_optax._internal.types import Leaf, PyTree
from sam_optax.analysis._loss import Loss
from sam_optax.analysis._random import normal_like

# Step lengths are relative to the radius. A step that raises the loss is accepted, and the next one
# is longer, up to a length at which the iteration is the power method (the new point then depends
# almost only on the gradient). Other steps are rejected and the length is halved.
_LONGER, _SHORTER, _LONGEST = 1.5, 0.5, 4.0


class Ascent(NamedTuple):
    """Result of :func:`maximize`: ε and its rise, L(w), rises of the first step and all starts."""

    eps: optax.Params
    value: jax.Array
    loss: jax.Array
    one_step: jax.Array
    starts: jax.Array


class _Point(NamedTuple):
    """State of an ascent: u with ε = T u, loss and gradient there, length of the next step."""

    u: Leaf
    loss: jax.Array
    grad: PyTree
    length: jax.Array


@functools.partial(jax.jit, static_argnames=("p", "steps", "restarts"))
def maximize(
    loss: Loss,
    params: optax.Params,
    scaling: optax.Params | None,
    rho: chex.Numeric,
    words: chex.Array,
    *,
    p: float,
    steps: int,
    restarts: int,
) -> Ascent:
    """Maximizes L(w + T u) over ‖u‖_p ≤ ρ.

    Every start takes ``steps`` gradients. The first is u = 0, and its first step is that of SAM or
    ASAM; the others are random points on the sphere, in opposite pairs, where the gradient is
    nonzero even if it is zero at w.
    """
    zero = jax.tree.map(
        lambda w: jnp.zeros(jnp.shape(w), trees.compute_dtype(w)), trees.inexact_only(params)
    )
    method = sam_optax.sam(1.0, p=p)

    def scaled(u: Leaf) -> Leaf:
        return (
            u if scaling is None else jax.tree.map(lambda x, t: x * t.astype(x.dtype), u, scaling)
        )

    def point(u: Leaf) -> Leaf:
        return trees.add(params, scaled(u))

    def evaluate(u: Leaf) -> tuple[jax.Array, PyTree]:
        value, grads = loss.value_and_grad(point(u))
        return value, scaled(jax.tree.map(trees.widen, grads))

    def proposal(at: _Point) -> PyTree:
        direction, _ = method.update(at.grad, method.init(at.grad))
        length = at.length * jnp.asarray(rho).astype(at.length.dtype)
        moved = jax.tree.map(lambda x, d: x + length.astype(x.dtype) * d, at.u, direction)
        return project(moved, rho, p)

    def select(better: jax.Array, new: Leaf, old: Leaf) -> Leaf:
        return jax.tree.map(lambda a, b: jnp.where(better, a, b), new, old)

    def step(carry: tuple[_Point, PyTree], i: jax.Array) -> tuple[tuple[_Point, PyTree], jax.Array]:
        at, u = carry
        value, grad = evaluate(u)
        better = value > at.loss  # false for NaN
        changed = at.length * jnp.where(better, _LONGER, _SHORTER).astype(at.length.dtype)
        length = jnp.where(i > 0, jnp.minimum(changed, _LONGEST), at.length)
        u, kept, grad = select(better, (u, value, grad), (at.u, at.loss, at.grad))
        at = _Point(u, kept, grad, length)
        return (at, proposal(at)), value

    # The first evaluation is at the start, which always replaces the placeholder.
    nothing = _Point(
        zero, jnp.full_like(_loss_like(loss, params), -jnp.inf), zero, jnp.ones((), jnp.float32)
    )

    def climb(best: tuple[PyTree, jax.Array], i: jax.Array) -> tuple[PyTree, tuple[jax.Array, ...]]:
        (end, u), visited = lax.scan(step, (nothing, start(i)), jnp.arange(steps))
        last = loss(point(u))
        u, value = select(last > end.loss, (u, last), (end.u, end.loss))
        visited = jnp.concatenate([visited, last[None]])
        return select(value > best[1], (u, value), best), (value, visited[0], visited[1])

    def start(i: jax.Array) -> PyTree:
        # Random starts come in opposite pairs: near a minimum the loss rises on both sides along
        # the sharpest direction, but more on one side.
        draw = normal_like(noise.fold_in(words, (i + 1) // 2), zero)
        norm = vectors.p_norm(draw, p)
        factor = jnp.asarray(rho).astype(norm.dtype) / jnp.where(norm > 0, norm, 1)
        factor = jnp.where(i > 0, jnp.where(i % 2 == 1, factor, -factor), 0)
        return jax.tree.map(lambda z: z * factor.astype(z.dtype), draw)

    indices = jnp.arange(1 + restarts, dtype=jnp.int32)
    (u, value), (starts, base, first) = lax.scan(climb, (zero, nothing.loss), indices)
    eps = jax.tree.map(lambda w, e: trees.cast_like(e, w), trees.inexact_only(params), scaled(u))
    return Ascent(eps, value - base[0], base[0], first[0] - base[0], starts - base[0])


def _loss_like(loss: Loss, params: optax.Params) -> jax.Array:
    shape = jax.eval_shape(loss, params)
    return jnp.zeros((), shape.dtype)


def project(tree: PyTree, rho: chex.Numeric, p: float) -> PyTree:
    """Projects the tree into the ball ‖·‖_p ≤ ρ; a tree inside it is unchanged.

    For p = 2 and p = ∞ it is the nearest point (rescaled, clipped). For other p the tree is
    rescaled onto the sphere, which stays within the ball but is not the nearest point.
    """
    if math.isinf(p):
        return trees.map_inexact(lambda x: _shrink(x, jnp.abs(x), rho), tree)
    norm = vectors.p_norm(tree, p)
    return trees.map_inexact(lambda x: _shrink(x, norm, rho), tree)


def _shrink(x: jax.Array, magnitude: jax.Array, rho: chex.Numeric) -> jax.Array:
    """``x`` times ρ/magnitude where that is below one."""
    rho = jnp.asarray(rho).astype(magnitude.dtype)
    factor = jnp.where(magnitude > rho, rho / jnp.where(magnitude > rho, magnitude, 1), 1)
    return x * factor.astype(x.dtype)
