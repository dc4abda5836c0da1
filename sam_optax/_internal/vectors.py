"""Pytrees as vectors: norms, inner products and projections over all inexact leaves.

Sums are taken in float32 or wider, and each leaf is read once. Trees that are sharded inside
``jax.shard_map`` are summed over the axis ``axis_name``.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from chex import Numeric
from jax import lax

from sam_optax._internal import trees
from sam_optax._internal.devices import Axes, is_replicated
from sam_optax._internal.types import Leaf, PyTree

_RESCUE = 2.0**96  # brings any float32 into the range of safe squares, exactly
_SMALLEST_TRUSTED = 2.0**-100


class Norm(NamedTuple):
    """The norm ``value / scale`` in factors that do not overflow; ``scale`` is a power of two."""

    scale: jax.Array | float
    value: jax.Array


def accumulator_dtype(leaves: Sequence[Leaf]) -> np.dtype:
    """The widest real dtype among the leaves, at least float32."""
    real = (jnp.finfo(trees.compute_dtype(leaf)).dtype for leaf in leaves)
    return functools.reduce(np.promote_types, real, np.dtype(np.float32))


def total(terms: Sequence[jax.Array], dtype: np.dtype, axis_name: Axes = None) -> jax.Array:
    """The sum of all elements of all arrays, which may be sharded over an axis of devices."""
    whole: list[jax.Array] = []
    sharded: list[jax.Array] = []
    for term in trees.largest_first(terms):
        part = jnp.sum(term, dtype=term.dtype).astype(dtype)
        replicated = axis_name is None or is_replicated(term, axis_name)
        (whole if replicated else sharded).append(part)
    result = trees.sum_scalars(whole, dtype)
    if axis_name is None:
        return result
    return result + lax.psum(trees.sum_scalars(sharded, dtype), axis_name)


def times(x: jax.Array, *factors: Numeric) -> jax.Array:
    """The product, in the dtype of ``x``."""
    for factor in factors:
        if not (isinstance(factor, float) and factor == 1.0):
            x = x * jnp.asarray(factor).astype(x.dtype)
    return x


def or_1(length: jax.Array) -> jax.Array:
    """A safe divisor: where it is 0, the dividend is 0 too or the quotient is not used."""
    return jnp.where(length > 0, length, 1)


@jax.custom_jvp
def root(squares: jax.Array) -> jax.Array:
    """The square root with derivative 0 at 0, so that derivatives through a step are finite."""
    return jnp.sqrt(squares)


@root.defjvp
def _root_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    value = root(*primals)
    slope = jnp.where(value > 0, 0.5 / or_1(value), 0)
    return value, slope * tangents[0]


def squared(leaf: jax.Array) -> jax.Array:
    """|x|² of each element."""
    if jnp.iscomplexobj(leaf):
        return jnp.square(leaf.real) + jnp.square(leaf.imag)
    return jnp.square(leaf)


def l2_norm(
    leaves: Callable[[], list[jax.Array]], *, full_range: bool, axis_name: Axes = None
) -> Norm:
    """``(sum |x|^2)^(1/2)`` over all leaves, in float32 or wider, each of which is read once.

    Squares of float32 are safe between about 1e-19 and 1e19. With ``full_range`` (values from
    bfloat16), a sum outside is recomputed with scaled elements, in a branch that otherwise does not
    run and that calls ``leaves`` again, instead of storing wide copies.
    """

    def sum_of_squares(scale: Numeric) -> jax.Array:
        scaled = [times(x, scale) for x in leaves()]
        return total([squared(x) for x in scaled], accumulator_dtype(scaled), axis_name)

    squares = sum_of_squares(1.0)
    if not full_range:
        return Norm(1.0, root(squares))
    trusted = (squares > _SMALLEST_TRUSTED) & (squares < jnp.inf)
    rescue = jnp.where(squares > 1, 1 / _RESCUE, _RESCUE).astype(squares.dtype)
    scale = jnp.where(trusted, jnp.ones_like(rescue), rescue)
    return Norm(scale, root(lax.cond(trusted, lambda: squares, lambda: sum_of_squares(rescue))))


def squares_overflow(tree: PyTree) -> bool:
    """Whether a leaf's dtype is narrow but has a range like float32's (bfloat16)."""
    infos = [jnp.finfo(jnp.result_type(leaf)) for leaf in trees.inexact_leaves(tree)]
    return any(info.bits < 32 and info.maxexp > 64 for info in infos)


def norm(tree: PyTree, axis_name: Axes = None, like: PyTree = None) -> jax.Array:
    """‖·‖₂. Wide leaves have the range of those of ``like``, which they were computed from."""
    full_range = squares_overflow(tree if like is None else like)
    found = l2_norm(lambda: trees.wide_leaves(tree), full_range=full_range, axis_name=axis_name)
    return found.value / found.scale


def max_norm(leaves: Sequence[jax.Array], axis_name: Axes = None) -> jax.Array:
    """``max |x|``; 0 for no leaves."""
    dtype = accumulator_dtype(leaves)
    maxima = [jnp.max(jnp.abs(leaf)).astype(dtype) for leaf in leaves if leaf.size]
    largest = functools.reduce(jnp.maximum, maxima, jnp.zeros((), dtype))
    return largest if axis_name is None else lax.pmax(largest, axis_name)


def p_norm(tree: PyTree, p: float) -> jax.Array:
    """‖·‖_p, for 1 ≤ p ≤ ∞."""
    if p == 2:
        return norm(tree)
    leaves = trees.wide_leaves(tree)
    largest = max_norm(leaves)
    if math.isinf(p):
        return largest
    # Powers of elements relative to the largest neither overflow nor all underflow.
    powers = [(jnp.abs(x) / or_1(largest).astype(jnp.finfo(x.dtype).dtype)) ** p for x in leaves]
    return largest * total(powers, largest.dtype) ** (1 / p)


def inner(a: PyTree, b: PyTree, axis_name: Axes = None, scale: Numeric = 1.0) -> jax.Array:
    """Re⟨s a, s b⟩, over leaves that neither tree lacks; the scale s prevents overflow."""

    def product(x: Leaf, y: Leaf) -> jax.Array:
        x, y = times(trees.widen(x), scale), times(trees.widen(y), scale)
        return jnp.real(jnp.conj(y) * x)

    terms = trees.inexact_leaves(trees.map_inexact(product, b, a))
    return total(terms, accumulator_dtype(trees.inexact_leaves(b)), axis_name)


def coefficient(a: PyTree, b: PyTree, axis_name: Axes = None) -> jax.Array:
    """⟨a, b⟩/‖b‖², which makes ``coefficient * b`` the projection of a on b; 0 for b = 0."""
    scale: Numeric = 1.0
    if squares_overflow(b):
        length = norm(b, axis_name)
        scale = jnp.where(length > 0, 1 / or_1(length), 0)
    square = inner(b, b, axis_name, scale)
    return inner(a, b, axis_name, scale) / or_1(square)


def combine(a: PyTree, b: PyTree, c: Numeric) -> PyTree:
    """``a + c b``, in float32 or wider; non-float leaves of ``a`` are unchanged."""

    def leaf(x: Leaf, y: Leaf) -> jax.Array:
        wide = trees.widen(x)
        return wide if y is None else wide + times(jnp.asarray(y).astype(wide.dtype), c)

    return trees.map_inexact(leaf, a, b)


def reject(a: PyTree, b: PyTree, axis_name: Axes = None) -> tuple[PyTree, jax.Array]:
    """The component of ``a`` orthogonal to ``b``, in float32 or wider, and its norm."""
    rest = combine(a, b, -coefficient(a, b, axis_name))
    length = norm(rest, axis_name, like=a)
    bits = min((jnp.finfo(jnp.result_type(x)).nmant for x in trees.inexact_leaves(a)), default=23)
    # Else 0: rounding error of ``a`` must not be normalized to full length.
    kept = length > 4 * 2.0**-bits * norm(a, axis_name)
    rest = trees.map_inexact(lambda x: jnp.where(kept, x, jnp.zeros_like(x)), rest)
    return rest, jnp.where(kept, length, jnp.zeros_like(length))


def widened(tree: PyTree) -> PyTree:
    """The inexact leaves in their compute dtype, ``None`` for others."""
    return trees.inexact_only(trees.map_inexact(trees.widen, tree))


def scale(tree: PyTree, factor: Numeric) -> PyTree:
    """The inexact leaves times a number, in their compute dtype."""
    return jax.tree.map(lambda x: times(x, factor), widened(tree))


def rescaled(tree: PyTree, factor: Numeric) -> PyTree:
    """The tree times a number, in its own dtypes; leaves that are not inexact stay."""
    return trees.map_wide(lambda x: times(x, factor), tree)


def unit(tree: PyTree) -> PyTree:
    """The tree divided by its norm; zeros stay zeros."""
    return scale(tree, 1 / or_1(norm(tree)))


def add(a: PyTree, b: PyTree) -> PyTree:
    """The sum of the inexact leaves of two trees, in their compute dtype."""
    return jax.tree.map(jnp.add, widened(a), widened(b))


class Angle(NamedTuple):
    """The norms of two trees, and the cosine between them: 0 if either is zero."""

    norm_a: jax.Array
    norm_b: jax.Array
    cosine: jax.Array


def angle(a: PyTree, b: PyTree, axis_name: Axes = None) -> Angle:
    """‖a‖, ‖b‖ and ⟨a, b⟩/(‖a‖ ‖b‖)."""
    norm_a, norm_b = norm(a, axis_name), norm(b, axis_name)
    length_a, length_b = or_1(norm_a), or_1(norm_b)
    if squares_overflow(a) or squares_overflow(b):
        value = inner(scale(a, 1 / length_a), scale(b, 1 / length_b), axis_name)
    else:
        value = inner(a, b, axis_name) / length_a / length_b
    return Angle(norm_a, norm_b, jnp.clip(value, -1, 1))


def cosine(a: PyTree, b: PyTree) -> jax.Array:
    """The cosine of the angle between two trees, in [−1, 1]; NaN if either is zero."""
    lengths = jnp.minimum(norm(a), norm(b))
    return jnp.where(lengths > 0, angle(unit(a), unit(b)).cosine, jnp.nan)
