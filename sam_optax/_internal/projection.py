"""Projections of one tree on another, both taken as one vector."""

from typing import Any

import chex
import jax
import jax.numpy as jnp

from sam_optax._internal import norms, trees
from sam_optax._internal.devices import AxisName


def coefficient(a: Any, b: Any, axis_name: AxisName | None = None) -> jax.Array:
    """⟨a, b⟩/‖b‖², which makes ``coefficient * b`` the projection of a on b; 0 for b = 0."""
    scale: Any = 1.0
    if norms.squares_overflow(b):
        norm = norm_of(b, axis_name)
        scale = jnp.where(norm > 0, 1 / jnp.where(norm > 0, norm, 1), 0)

    def product(x: Any, y: Any) -> jax.Array:
        # Of complex numbers, the product of real vectors.
        x, y = _scaled(x, scale), _scaled(y, scale)
        return jnp.real(jnp.conj(y) * x)

    products = trees.inexact_leaves(trees.map_inexact(product, b, a))
    squares = trees.inexact_leaves(trees.map_inexact(product, b, b))
    dtype = norms.accumulator_dtype(squares)
    square = norms.total(squares, dtype, axis_name)
    return norms.total(products, dtype, axis_name) / jnp.where(square > 0, square, 1)


def _scaled(x: Any, scale: Any) -> jax.Array:
    wide = trees.widen(x)
    return wide if isinstance(scale, float) else wide * _as(scale, wide)


def norm_of(tree: Any, axis_name: AxisName | None = None, like: Any = None) -> jax.Array:
    """‖·‖₂ over all inexact leaves, float32 or wider.

    ``like`` is what a tree of wide leaves was computed from, whose range its values have.
    """

    def leaves() -> list[jax.Array]:
        return [trees.widen(leaf) for leaf in trees.inexact_leaves(tree)]

    full_range = norms.squares_overflow(tree if like is None else like)
    norm = norms.l2_norm(leaves, full_range=full_range, axis_name=axis_name)
    return norm.value / norm.scale


def reject(a: Any, b: Any, axis_name: AxisName | None = None) -> tuple[Any, jax.Array]:
    """The part of a that is orthogonal to b, in float32 or wider, and its norm.

    Both are 0 where the part is as small as the rounding of a: what is left then has no direction
    to speak of, and whoever normalizes it is not to blow it up.
    """
    c = coefficient(a, b, axis_name)
    rest = combine(a, b, -c)
    norm = norm_of(rest, axis_name, like=a)
    bits = min((jnp.finfo(jnp.result_type(x)).nmant for x in trees.inexact_leaves(a)), default=23)
    kept = norm > 4 * 2.0**-bits * norm_of(a, axis_name)
    rest = trees.map_inexact(lambda x: jnp.where(kept, x, jnp.zeros_like(x)), rest)
    return rest, jnp.where(kept, norm, jnp.zeros_like(norm))


def combine(a: Any, b: Any, c: chex.Numeric) -> Any:
    """A + c b, in float32 or wider; leaves of a that are not inexact stay."""

    def leaf(x: Any, y: Any) -> jax.Array:
        if y is None:
            return trees.widen(x)
        wide = trees.widen(x)
        return wide + _as(c, wide) * jnp.asarray(y).astype(wide.dtype)

    return trees.map_inexact(leaf, a, b)


def _as(factor: chex.Numeric, like: Any) -> jax.Array:
    return jnp.asarray(factor).astype(trees.compute_dtype(like))
