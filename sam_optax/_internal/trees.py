"""Leaf-wise arithmetic that keeps dtypes and leaves non-float leaves unchanged."""

import functools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from chex import Array
from jax import lax
from jax.typing import DTypeLike

from sam_optax._internal.types import Function, Leaf, PyTree

_SCALARS = 32  # are summed in one kernel


def is_inexact(leaf: Leaf) -> bool:
    """Whether a leaf is a floating-point or complex array (or Python number)."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return isinstance(leaf, (float, complex))
    return jnp.issubdtype(dtype, jnp.inexact)


def is_none(leaf: Leaf) -> bool:
    """For ``is_leaf``: ``None`` counts as a leaf, so that trees with ``None`` leaves match."""
    return leaf is None


def is_missing(leaf: Leaf) -> bool:
    """For ``jax.tree.map``, to see what ``optax.masked`` leaves out, too."""
    return leaf is None or isinstance(leaf, optax.MaskedNode)


def is_array(leaf: Leaf) -> bool:
    """Whether a leaf is a number or an array of numbers or keys, not of strings or objects."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        return jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == np.bool_
    return isinstance(leaf, (jax.Array, bool, int, float, complex))


def all_arrays(tree: PyTree) -> bool:
    """Whether all leaves are :func:`is_array`."""
    return all(is_array(leaf) for leaf in jax.tree.leaves(tree))


def map_inexact(f: Function, tree: PyTree, *rest: PyTree) -> PyTree:
    """``jax.tree.map`` over the inexact leaves of ``tree``; other leaves are unchanged.

    ``None`` counts as a leaf, so that a tree with ``None`` leaves (``equinox.filter``) matches one
    without. Integer, boolean, ``float0`` and key leaves pass through.
    """

    def at(leaf: Leaf, *others: Leaf) -> Leaf:
        return f(leaf, *others) if is_inexact(leaf) else leaf

    return jax.tree.map(at, tree, *rest, is_leaf=is_none)


def map_wide(f: Function, tree: PyTree, *rest: PyTree) -> PyTree:
    """:func:`map_inexact` with leaves in float32 or wider, cast back to their dtypes."""
    return map_inexact(lambda leaf, *others: cast_like(f(widen(leaf), *others), leaf), tree, *rest)


def inexact_leaves(tree: PyTree) -> list[Array]:
    """The floating-point and complex leaves of a tree."""
    return [leaf for leaf in jax.tree.leaves(tree) if is_inexact(leaf)]


def wide_leaves(tree: PyTree) -> list[jax.Array]:
    """The floating-point and complex leaves of a tree, in their compute dtypes."""
    return [widen(leaf) for leaf in inexact_leaves(tree)]


def largest_first(leaves: Iterable[Leaf]) -> list[Leaf]:
    """The leaves in order of decreasing size, for sums over all of them."""
    # XLA computes the last few terms in one kernel with the sum. If they come from small leaves, it
    # compiles in half the time, and each large leaf keeps a separate kernel.
    return sorted(leaves, key=jnp.size, reverse=True)


def sum_scalars(terms: Sequence[jax.Array], dtype: DTypeLike) -> jax.Array:
    """The sum of scalars of one dtype: in order for at most 32, in groups for more."""
    # XLA for CPUs compiles a sum of scalars to one kernel, in a time that grows with the square of
    # their number (a third of the compile time of a tree of 600 leaves). It does not fuse sorting.
    while len(terms) > _SCALARS:
        groups = [terms[i : i + _SCALARS] for i in range(0, len(terms), _SCALARS)]
        terms = [jnp.sum(lax.sort(jnp.stack(group)), dtype=dtype) for group in groups]
    return functools.reduce(jnp.add, terms, jnp.zeros((), dtype))


def promote(a: PyTree, b: PyTree) -> np.dtype:
    """The narrowest dtype for both, by NumPy's rule, which also works under strict promotion."""
    a, b = np.dtype(a), np.dtype(b)
    return a if a == b else np.promote_types(np.promote_types(a, np.float32), b)


def compute_dtype(leaf: Leaf) -> np.dtype:
    """The dtype for arithmetic on a leaf: float32 or wider."""
    return promote(jnp.result_type(leaf), np.float32)


def widen(leaf: Leaf) -> jax.Array:
    """The leaf in its compute dtype."""
    return jnp.asarray(leaf).astype(compute_dtype(leaf))


def cast_like(value: jax.Array, leaf: Leaf) -> jax.Array:
    """``value`` with the dtype and the weak type of ``leaf``."""
    leaf = jnp.asarray(leaf)
    value = value.astype(leaf.dtype)
    # Indexed updates are the public operation that keeps the weak type of its operand.
    return leaf.at[...].set(value) if leaf.weak_type else value


def cast_if_range_allows(value: jax.Array, leaf: Leaf) -> jax.Array:
    """:func:`cast_like` except to a narrower range (float16), which a difference may exceed."""
    narrow = jnp.finfo(jnp.result_type(leaf)).maxexp < jnp.finfo(value.dtype).maxexp
    return value if narrow else cast_like(value, leaf)


def zeros_like(leaf: Leaf) -> Leaf:
    """Zeros with the shape and dtype of the leaf; a ``float0`` leaf is returned."""
    if getattr(leaf, "dtype", None) == jax.dtypes.float0:
        return np.zeros(leaf.shape, jax.dtypes.float0)
    return jnp.zeros_like(leaf)


def inexact_zeros(tree: PyTree, dtype: DTypeLike | None = None) -> PyTree:
    """Zeros for the inexact leaves, in ``dtype`` or each leaf's own; ``None`` for the others."""
    return jax.tree.map(lambda leaf: jnp.zeros_like(leaf, dtype=dtype), inexact_only(tree))


def cast_state_like(new: Leaf, old: Leaf) -> Leaf:
    """A leaf of a new state in the dtype of the old state."""
    if is_inexact(new) and is_inexact(old) and jnp.result_type(new) != jnp.result_type(old):
        return cast_like(jnp.asarray(new), old)
    return new


def as_dtype_of(leaf: Leaf, other: Leaf) -> jax.Array:
    """The leaf in the dtype of another."""
    return jnp.asarray(leaf).astype(other.dtype)


def dtypes(tree: PyTree) -> list[np.dtype]:
    """The dtypes of the inexact leaves."""
    return list(map(jnp.result_type, inexact_leaves(tree)))


def as_perturbed(params: PyTree, dtype: DTypeLike) -> PyTree:
    """The params in the dtype that ``add`` gives perturbed params."""
    return map_inexact(lambda p: jnp.asarray(p).astype(_perturbed_dtype(p, dtype)), params)


def _perturbed_dtype(p: Leaf, dtype: DTypeLike) -> DTypeLike:
    """``dtype``, for a complex leaf its complex counterpart."""
    return promote(dtype, jnp.result_type(p)) if jnp.iscomplexobj(p) else dtype


def add(params: PyTree, eps: PyTree, dtype: DTypeLike | None = None) -> PyTree:
    """``params + eps`` where both are floats, in the dtype of the params (or in ``dtype``)."""

    def add_leaf(e: Leaf, p: Leaf) -> Leaf:
        if not (is_inexact(e) and is_inexact(p)):
            return p
        p = jnp.asarray(p)
        target = p.dtype if dtype is None else _perturbed_dtype(p, dtype)
        common = promote(target, jnp.result_type(e))
        total = p.astype(common) + jnp.asarray(e).astype(common)
        return cast_like(total, p) if dtype is None else total.astype(target)

    return jax.tree.map(add_leaf, eps, params, is_leaf=is_none)


def inexact_only(tree: PyTree) -> PyTree:
    """The tree with ``None`` in place of non-float leaves."""
    return jax.tree.map(lambda leaf: leaf if is_inexact(leaf) else None, tree)


def merge(inexact: PyTree, tree: PyTree) -> PyTree:
    """The leaves of ``inexact``, or of ``tree`` where ``inexact`` is ``None``."""
    return jax.tree.map(lambda a, b: b if a is None else a, inexact, tree, is_leaf=is_none)


def cast_tree_like(tree: PyTree, inexact: PyTree) -> PyTree:
    """``tree`` with the structure and dtypes of ``inexact``, which supplies missing leaves."""

    def cast(old: Leaf, new: Leaf) -> Leaf:
        return cast_like(new, old) if is_inexact(new) and old is not None else old

    return jax.tree.map(cast, inexact, tree, is_leaf=is_none)


def displacement(grads: PyTree, params: PyTree, point: PyTree) -> PyTree:
    """``point − params`` where there is a gradient, else ``None``."""

    def subtract(g: Leaf, p: Leaf, q: Leaf) -> jax.Array | None:
        moved = is_inexact(g) and is_inexact(p)
        return jnp.asarray(q) - jnp.asarray(p) if moved else None

    return jax.tree.map(subtract, grads, params, point, is_leaf=is_none)
