"""The Hessian as an operator on vectors, and its Krylov spaces."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from matfree import decomp
from scipy.linalg import eigh_tridiagonal

from sam_optax._internal import trees, vectors
from sam_optax._internal.types import Leaf, PyTree
from sam_optax.analysis._loss import Loss

NOT_FINITE = "the Hessian is not finite: check the loss at these params."


class Krylov(NamedTuple):
    """Result of a Lanczos run: H ≈ Qᵀ T Q on the space that a start vector spans.

    Attributes:
      vectors: (steps, n), the rows of Q.
      diagonal: (steps,) diagonal of T.
      off_diagonal: (steps − 1,) the off-diagonal of T.
      usable: int32 scalar, the number of valid steps. Once the space is exhausted, the next vector
        is zero or rounding noise; the earlier ones are exact and do not depend on it.
    """

    vectors: jax.Array
    diagonal: jax.Array
    off_diagonal: jax.Array
    usable: jax.Array


def flatten(params: optax.Params) -> tuple[jax.Array, Callable[[jax.Array], PyTree]]:
    """Ravels the floating-point leaves into one vector, float32 or wider, with the inverse.

    The vector is replicated. Where shardings are part of the types (meshes with explicit axes), the
    inverse restores those of the leaves.
    """
    leaves, structure = jax.tree.flatten(trees.inexact_only(params))
    if any(jnp.iscomplexobj(leaf) for leaf in leaves):
        raise ValueError("params must be real: the Hessian of complex params is not supported.")
    wide = [_replicated(trees.widen(leaf)) for leaf in leaves]
    dtype = vectors.accumulator_dtype(wide)
    ends = np.cumsum([leaf.size for leaf in wide])
    flat = jnp.concatenate([jnp.zeros(0, dtype), *(x.astype(dtype).reshape(-1) for x in wide)])

    def unflatten(vector: jax.Array) -> PyTree:
        parts = jnp.split(vector, ends[:-1])
        shaped = [
            _placed_as(part.reshape(leaf.shape).astype(leaf.dtype), original)
            for part, leaf, original in zip(parts, wide, leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, shaped)

    return flat, unflatten


def _explicit_sharding(leaf: Leaf) -> NamedSharding | None:
    """The sharding of an array whose type has one."""
    if not isinstance(leaf, jax.Array) or not hasattr(jax, "typeof"):
        return None
    sharding = jax.typeof(leaf).sharding
    return sharding if any(axis is not None for axis in sharding.spec) else None


def _replicated(leaf: jax.Array) -> jax.Array:
    sharding = _explicit_sharding(leaf)
    if sharding is None:
        return leaf
    return jax.sharding.reshard(leaf, NamedSharding(sharding.mesh, PartitionSpec()))


def _placed_as(leaf: jax.Array, other: Leaf) -> jax.Array:
    sharding = _explicit_sharding(other)
    return leaf if sharding is None else jax.sharding.reshard(leaf, sharding)


def size(params: optax.Params) -> int:
    """The number of weights."""
    return sum(np.size(leaf) for leaf in jax.tree.leaves(trees.inexact_only(params)))


def hessian(loss: Loss, params: optax.Params) -> Callable[[jax.Array], jax.Array]:
    """``v -> H v`` on flat vectors."""
    _, unflatten = flatten(params)

    def product(v: jax.Array) -> jax.Array:
        return flatten(loss.hvp(params, unflatten(v)))[0].astype(v.dtype)

    return product


def lanczos(product: Callable[[jax.Array], jax.Array], start: jax.Array, steps: int) -> Krylov:
    """The Lanczos process with full reorthogonalization.

    It runs on the operator divided by a power of two near its size, whose squares neither overflow
    nor vanish, and from a unit vector.
    """
    run = decomp.tridiag_sym(steps, materialize=False, reortho="full", custom_vjp=False)
    start = vectors.unit(start)
    image = product(start)
    norm = vectors.l2_norm(lambda: [image], full_range=True)
    size = norm.value / norm.scale
    scale = jnp.where(size > 0, jnp.exp2(jnp.round(jnp.log2(jnp.where(size > 0, size, 1)))), 1)
    q, (diagonal, off_diagonal), *_ = run(lambda v: product(v) / scale, start)
    overlap = jnp.abs(q @ q.T - jnp.eye(steps, dtype=q.dtype))
    # Row i is valid if it is orthonormal to the rows before it; a comparison with NaN is false.
    sound = jnp.all(jnp.tril(overlap) <= jnp.sqrt(jnp.finfo(q.dtype).eps), axis=1)
    usable = jnp.sum(jnp.cumprod(sound.astype(jnp.int32)))
    # Behind an exhausted space comes 0/0, which jax_debug_nans would take for a fault.
    row = jnp.arange(steps)
    return Krylov(
        vectors=jnp.where(row[:, None] < usable, q, 0),
        diagonal=jnp.where(row < usable, diagonal * scale, 0),
        off_diagonal=jnp.where(row[1:] < usable, off_diagonal * scale, 0),
        usable=usable,
    )


def decompose(
    diagonal: chex.Array, off_diagonal: chex.Array, usable: int
) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues, ascending, and eigenvectors (columns) of the usable part of T, in float64."""
    diagonal = np.asarray(diagonal, np.float64)[:usable]
    off_diagonal = np.asarray(off_diagonal, np.float64)[: max(usable - 1, 0)]
    if not usable or not np.all(np.isfinite([*diagonal, *off_diagonal])):
        raise ValueError(NOT_FINITE)
    return eigh_tridiagonal(diagonal, off_diagonal)


@functools.partial(jax.jit, static_argnames="steps")
def deflated_lanczos(
    loss: Loss,
    params: optax.Params,
    start: jax.Array,
    known: jax.Array,
    shift: chex.Numeric,
    steps: int,
) -> Krylov:
    """A run in the complement of the orthonormal rows of ``known`` (rows of zeros: none).

    Rounding brings the known directions back. They have the eigenvalue ``shift``, to be chosen
    different from the eigenvalues that are sought.
    """
    product = hessian(loss, params)

    def outside(v: jax.Array) -> jax.Array:
        return v - known.T @ (known @ v)

    def deflated(v: jax.Array) -> jax.Array:
        return outside(product(outside(v))) + jnp.asarray(shift).astype(v.dtype) * (
            known.T @ (known @ v)
        )

    return lanczos(deflated, outside(start), steps)


@jax.jit
def rayleigh_ritz(
    loss: Loss, params: optax.Params, vectors: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """An orthonormal basis V of the rows' span, as rows, and H times each of them.

    Zero rows are replaced by vectors that complete the basis.
    """
    basis = jnp.linalg.qr(vectors.T)[0].T
    return basis, lax.map(hessian(loss, params), basis)


def dense(loss: Loss, params: optax.Params) -> np.ndarray:
    """The Hessian, (n, n), symmetrized in float64."""
    matrix = np.asarray(_rows(loss, params), np.float64)
    if not np.all(np.isfinite(matrix)):
        raise ValueError(NOT_FINITE)
    return (matrix + matrix.T) / 2


@jax.jit
def _rows(loss: Loss, params: optax.Params) -> jax.Array:
    flat, _ = flatten(params)
    return lax.map(hessian(loss, params), jnp.eye(flat.size, dtype=flat.dtype))
