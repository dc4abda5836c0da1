"""Norms of a whole tree as one vector."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sam_optax._internal import trees
from sam_optax._internal.devices import AxisName, is_replicated

# A power of two, so that scaling by it is exact; it brings any float32 to where squares are safe.
_RESCUE = 2.0**96
_SMALLEST_TRUSTED = 2.0**-100


class Norm(NamedTuple):
    """A norm in two factors, neither of which overflows: the norm is ``value / scale``.

    Attributes:
      scale: power of two that elements are multiplied by before anything else.
      value: norm of the scaled elements, float32 or wider.
    """

    scale: jax.Array | float
    value: jax.Array


def accumulator_dtype(leaves: Sequence[jax.Array]) -> np.dtype:
    """The widest real dtype among the leaves, at least float32."""
    dtype = np.dtype(np.float32)
    for leaf in leaves:
        dtype = np.promote_types(dtype, jnp.finfo(leaf.dtype).dtype)
    return dtype


def total(
    terms: Sequence[jax.Array], dtype: np.dtype, axis_name: AxisName | None = None
) -> jax.Array:
    """The sum of all elements of all arrays, which may be sharded over an axis of devices."""
    result = sharded = jnp.zeros((), dtype)
    for term in terms:
        part = jnp.sum(term, dtype=term.dtype).astype(dtype)
        if axis_name is None or is_replicated(term, axis_name):
            result = result + part
        else:
            sharded = sharded + part
    return result if axis_name is None else result + lax.psum(sharded, axis_name)


def _sum_of_squares(leaves: Sequence[jax.Array], axis_name: AxisName | None) -> jax.Array:
    def squares(leaf: jax.Array) -> jax.Array:
        if jnp.iscomplexobj(leaf):
            return jnp.square(leaf.real) + jnp.square(leaf.imag)
        return jnp.square(leaf)

    return total([squares(leaf) for leaf in leaves], accumulator_dtype(leaves), axis_name)


def l2_norm(
    leaves: Callable[[], Sequence[jax.Array]],
    *,
    full_range: bool,
    axis_name: AxisName | None = None,
) -> Norm:
    """``(sum |x|^2)^(1/2)`` over all leaves, each of which is read once.

    Squares of float32 values are safe between about 1e-19 and 1e19.

    Args:
      leaves: returns the arrays, of float32 or wider (real or complex). A function, so that a
        branch below computes them from what they come from instead of holding wide copies.
      full_range: whether values may lie anywhere in the range of float32, as values that come
        from bfloat16 may. Then a sum that left the range where it can be trusted is taken
        again with scaled elements, in a branch that otherwise does not run.
      axis_name: axis of devices that the arrays are sharded over.
    """
    squares = _sum_of_squares(leaves(), axis_name)
    if not full_range:
        return Norm(1.0, jnp.sqrt(squares))

    def rescued() -> jax.Array:
        return _sum_of_squares([x * rescue.astype(x.dtype) for x in leaves()], axis_name)

    trusted = (squares > _SMALLEST_TRUSTED) & (squares < jnp.inf)
    rescue = jnp.where(squares > 1, 1 / _RESCUE, _RESCUE).astype(squares.dtype)
    scale = jnp.where(trusted, jnp.ones_like(rescue), rescue)
    return Norm(scale, jnp.sqrt(lax.cond(trusted, lambda: squares, rescued)))


def squares_overflow(tree: Any) -> bool:
    """Whether a leaf's dtype is narrow but has a range like float32's (bfloat16)."""
    infos = [jnp.finfo(jnp.result_type(leaf)) for leaf in trees.inexact_leaves(tree)]
    return any(info.bits < 32 and info.maxexp > 64 for info in infos)


def max_norm(leaves: Sequence[jax.Array], axis_name: AxisName | None = None) -> jax.Array:
    """``max |x|`` over all leaves; 0 for no leaves."""
    dtype = accumulator_dtype(leaves)
    largest = jnp.zeros((), dtype)
    for leaf in leaves:
        if leaf.size:
            largest = jnp.maximum(largest, jnp.max(jnp.abs(leaf)).astype(dtype))
    return largest if axis_name is None else lax.pmax(largest, axis_name)
