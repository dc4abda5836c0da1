"""The k largest elements of a tree, by counting: without sorting, gathering or moving data.

Elements are compared as unsigned integers, and the k-th largest is found bit by bit, with one count
over the tree per bit. A sharded tree stays sharded.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from chex import Array, Numeric
from jax import lax

from sam_optax._internal import noise, trees
from sam_optax._internal.types import Leaf, PyTree


def rank(score: Leaf) -> jax.Array:
    """uint32 with the same order as the score ≥ 0; NaN counts as 0."""
    x = jnp.abs(jnp.asarray(score)).astype(jnp.float32)
    # Non-negative floats have the order of their bits. (The compiler assumes |x| ≥ 0 even for NaN.)
    return lax.bitcast_convert_type(jnp.where(jnp.isnan(x), 0, x), jnp.uint32)


def largest(ranks: PyTree, among: PyTree, k: Numeric, key: Array) -> PyTree:
    """Marks exactly ``k`` of the elements ``among`` is true for, those of highest rank.

    Leaves that are ``None`` are ignored. Ties are broken by 32 random bits from ``key``; elements
    that tie in these too are all chosen.
    """
    k = jnp.asarray(k).astype(jnp.uint32)
    threshold = _threshold(ranks, among, k)
    above = jax.tree.map(lambda r, a: a & (r > threshold), ranks, among)
    tied = jax.tree.map(lambda r, a: a & (r == threshold), ranks, among)
    chance = noise.bits_tree(key, ranks)
    lot = _threshold(chance, tied, k - _count(above))
    drawn = jax.tree.map(lambda c, t: t & (c >= lot), chance, tied)
    return jax.tree.map(lambda a, d: (a | d) & (k > 0), above, drawn)


def kth_largest(ranks: Sequence[jax.Array], k: Sequence[int]) -> list[jax.Array]:
    """The k-th largest rank of each array, all found in one loop."""

    def at_least(thresholds: list[jax.Array]) -> list[jax.Array]:
        pairs = zip(ranks, thresholds, k, strict=True)
        return [jnp.sum(r >= t, dtype=jnp.uint32) >= count for r, t, count in pairs]

    return _bit_by_bit(at_least, [jnp.zeros((), jnp.uint32) for _ in ranks])


def _threshold(ranks: PyTree, among: PyTree, k: jax.Array) -> jax.Array:
    """The largest t such that at least ``k`` of the elements have rank ≥ t."""

    def at_least(t: jax.Array) -> jax.Array:
        return _count(jax.tree.map(lambda r, a: a & (r >= t), ranks, among)) >= k

    return _bit_by_bit(at_least, jnp.zeros((), jnp.uint32))


def _bit_by_bit(holds: Callable[[PyTree], PyTree], zeros: PyTree) -> PyTree:
    """The largest uint32 (or tree of them, each for itself) for which something holds."""

    def with_bit(i: Array, found: PyTree) -> PyTree:
        bit = jnp.uint32(1) << jnp.asarray(31 - i, jnp.uint32)
        candidate = jax.tree.map(lambda t: t | bit, found)
        return jax.tree.map(jnp.where, holds(candidate), candidate, found)

    return lax.fori_loop(0, 32, with_bit, zeros)


def _count(marked: PyTree) -> jax.Array:
    leaves = trees.largest_first(jax.tree.leaves(marked))
    return trees.sum_scalars([jnp.sum(leaf, dtype=jnp.uint32) for leaf in leaves], jnp.uint32)


def everywhere(tree: PyTree, value: bool) -> PyTree:
    """A Boolean array for each inexact leaf, else ``None``."""
    return jax.tree.map(lambda x: jnp.full_like(x, value, dtype=bool), trees.inexact_only(tree))


def size(tree: PyTree) -> int:
    """Number of elements of the inexact leaves."""
    return sum(math.prod(jnp.shape(leaf)) for leaf in trees.inexact_leaves(tree))
