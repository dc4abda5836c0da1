"""The ball of the p-norm: norm of a tree as one vector, and points within the radius."""

import math
from typing import Any

import chex
import jax
import jax.numpy as jnp

from sam_optax._internal import norms, trees


def p_norm(tree: Any, p: float) -> jax.Array:
    """‖·‖_p over all inexact leaves, of float32 or wider."""
    leaves = trees.inexact_leaves(tree)
    if p == 2:
        norm = norms.l2_norm(lambda: leaves, full_range=False)
        return norm.value / norm.scale
    largest = norms.max_norm(leaves)
    if math.isinf(p):
        return largest
    # Powers of elements relative to the largest neither overflow nor all vanish.
    unit = jnp.where(largest > 0, largest, 1)
    powers = [(jnp.abs(x) / unit.astype(jnp.finfo(x.dtype).dtype)) ** p for x in leaves]
    return largest * norms.total(powers, largest.dtype) ** (1 / p)


def project(tree: Any, rho: chex.Numeric, p: float) -> Any:
    """A point of the ball ‖·‖_p ≤ ρ: the tree itself if it is inside.

    For p = 2 and p = ∞ it is the nearest point (rescaled, clipped). For other p the tree is
    rescaled onto the sphere, which stays within the ball but is not the nearest point.
    """
    if math.isinf(p):
        return trees.map_inexact(lambda x: _shrink(x, jnp.abs(x), rho), tree)
    norm = p_norm(tree, p)
    return trees.map_inexact(lambda x: _shrink(x, norm, rho), tree)


def _shrink(x: jax.Array, magnitude: jax.Array, rho: chex.Numeric) -> jax.Array:
    """``x`` times ρ/magnitude where that is below one."""
    rho = jnp.asarray(rho).astype(magnitude.dtype)
    factor = jnp.where(magnitude > rho, rho / jnp.where(magnitude > rho, magnitude, 1), 1)
    return x * factor.astype(x.dtype)
