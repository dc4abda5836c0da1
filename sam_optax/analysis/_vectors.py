"""Trees as vectors: inner products and cosines, in float32 or wider."""

from typing import Any

import chex
import jax
import jax.numpy as jnp

from sam_optax._internal import norms, trees
from sam_optax.analysis._ball import p_norm


def widened(tree: Any) -> Any:
    """The inexact leaves in their compute dtype, ``None`` for others."""
    return trees.inexact_only(trees.map_inexact(trees.widen, tree))


def norm(tree: Any) -> jax.Array:
    """‖·‖₂ over all inexact leaves."""
    return p_norm(widened(tree), 2)


def inner(a: Any, b: Any) -> jax.Array:
    """Re⟨a, b⟩ over all inexact leaves."""
    a, b = (trees.inexact_leaves(widened(tree)) for tree in (a, b))
    terms = [jnp.real(jnp.conj(x) * y) for x, y in zip(a, b, strict=True)]
    return norms.total(terms, norms.accumulator_dtype(terms))


def scale(tree: Any, factor: chex.Numeric) -> Any:
    """The inexact leaves times a number, in their compute dtype."""
    return jax.tree.map(
        lambda x: x * jnp.asarray(factor).astype(jnp.finfo(x.dtype).dtype), widened(tree)
    )


def unit(tree: Any) -> Any:
    """The tree divided by its norm; zeros stay zeros."""
    length = norm(tree)
    return scale(tree, 1 / jnp.where(length > 0, length, 1))


def add(a: Any, b: Any) -> Any:
    """The sum of the inexact leaves of two trees, in their compute dtype."""
    return jax.tree.map(jnp.add, widened(a), widened(b))


def cosine(a: Any, b: Any) -> jax.Array:
    """The cosine of the angle between two trees, in [−1, 1]; NaN if either is zero."""
    lengths = jnp.minimum(norm(a), norm(b))
    value = jnp.clip(inner(unit(a), unit(b)), -1, 1)
    return jnp.where(lengths > 0, value, jnp.nan)
