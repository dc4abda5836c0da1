"""Standard normal noise that is cheap to draw, cheap to draw again and cheap to compile.

A random start needs its noise twice: at the start and in the perturbation. Holding it would take
a copy of the params; drawing it with ``jax.random.normal`` costs about fifty times as much as
writing it down, and each use of ``jax.random`` in the step about half a second of compile time on
a CPU. Here each element is a function of its index and of two random words alone, in some twenty
arithmetic operations that the compiler fuses into whatever reads the noise: it is never held in
memory, and it is sharded as the params are.
"""

import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sam_optax._internal import trees

# Odd polynomial in s, the sum of three integers that are uniform on [0, 2^11), [0, 2^11) and
# [0, 2^10), centred and divided by 2^10. The coefficients are a least-squares fit of the normal
# quantile function, weighted by the exact distribution of s and scaled to variance 1. The
# distribution function is within 4e-4 of the normal one, the kurtosis is 2.9997, the largest
# magnitude 4.68.
_QUANTILE = (
    1.09911499,
    -0.0170216267,
    0.0170709122,
    0.00441047238,
    -0.00233205256,
    0.000283106587,
)
# Elements of a leaf that shares its draw with others.
_SMALL = 2**16
# What separates the words of one large leaf from those of the next.
_LEAF_STRIDE = (0x85EBCA6B, 0xC2B2AE35)
_MEAN_SUM = 2047 / 2 + 2047 / 2 + 1023 / 2


def check_key(key: Any) -> None:
    """Raises unless ``key`` is one PRNG key, typed or raw."""
    dtype = getattr(key, "dtype", None)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    raw = dtype == jnp.uint32
    if not (typed and key.shape == ()) and not (raw and key.ndim == 1):
        raise TypeError(
            "key must be one PRNG key, such as jax.random.key(0) or jax.random.PRNGKey(0), got "
            f"{key!r}."
        )


def first_key(key: chex.PRNGKey) -> jax.Array:
    """The state of a sequence of draws, from a typed or raw JAX key: uint32 of shape (2,)."""
    if jnp.issubdtype(key.dtype, jnp.unsignedinteger) and key.size == 4:
        key = jax.random.wrap_key_data(key, impl="rbg")  # raw, but not of the default kind
    return jax.random.bits(key, (2,), jnp.uint32)


def next_key(key: chex.Array) -> jax.Array:
    """The key of the next draw."""
    return _hash(_hash(_index((2,)), key), key[::-1])


def fold_in(key: chex.Array, index: chex.Numeric | None) -> chex.Array:
    """A key for one of several draws in the same step (of devices, of groups of the batch)."""
    if index is None:
        return key
    words = jnp.asarray(index).astype(jnp.uint32) * np.uint32(2) + _index((2,))
    return _hold(_hash(_hash(words, key), key[::-1] + np.uint32(_LEAF_STRIDE[0])))


def uniform(bits: chex.Array) -> jax.Array:
    """float32, uniform on [0, 1) in steps of 2^-24, from 32 random bits."""
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)


def bits_tree(key: chex.Array, tree: Any, one_a_leaf: bool = False) -> Any:
    """32 random bits for each element of each array of a tree.

    Args:
      key: uint32 words.
      tree: what the bits are for; ``None`` gets none.
      one_a_leaf: whether there is but one number, a scalar, for each leaf.
    """
    words = key

    def draw(leaf: Any) -> jax.Array | None:
        nonlocal words
        if leaf is None:
            return None
        words = _hold(words + np.array(_LEAF_STRIDE, np.uint32))
        return _hash(_index(() if one_a_leaf else jnp.shape(leaf)), words)

    return jax.tree.map(draw, tree, is_leaf=lambda leaf: leaf is None)


def normal_tree(key: chex.Array, params: Any, scale: chex.Numeric) -> Any:
    """Normal noise of standard deviation ``scale`` for the inexact leaves of a tree.

    Noise for a complex leaf has the variance in equal parts in its real and imaginary part.

    Leaves of up to ``_SMALL`` elements share one draw that is held in memory, because a kernel
    that draws takes longer to compile than a small leaf is worth. Each larger leaf has a draw of
    its own, which is repeated wherever it is read. Words and offsets run from leaf to leaf as
    values in memory: with constants in their place, no two leaves would share a compiled kernel.
    """
    leaves, structure = jax.tree.flatten(params, is_leaf=lambda leaf: leaf is None)
    shapes = [_draw_shape(leaf) for leaf in leaves]
    sizes = [0 if shape is None else math.prod(shape) for shape in shapes]
    shared = _hold(normal(key, (sum(size for size in sizes if size <= _SMALL),)) * scale)
    words = key
    offset = jnp.minimum(key[0], 0)  # unsigned, so that no code deals with negative offsets
    noise: list[jax.Array | None] = []
    for leaf, shape, size in zip(leaves, shapes, sizes, strict=True):
        if shape is None:
            noise.append(None)
            continue
        if size > _SMALL:
            words = _hold(words + np.array(_LEAF_STRIDE, np.uint32))
            draw = normal(words, shape) * scale
        else:
            draw = lax.dynamic_slice(shared, (offset,), (size,)).reshape(shape)
            offset = _hold(offset + np.uint32(size))
        if jnp.iscomplexobj(leaf):
            draw = lax.complex(draw[0], draw[1]) * np.complex64(0.5**0.5)
        noise.append(draw)
    return jax.tree.unflatten(structure, noise)


def _draw_shape(leaf: Any) -> tuple[int, ...] | None:
    """Shape of the real noise a leaf needs: two parts if it is complex, none if not inexact."""
    if not trees.is_inexact(leaf):
        return None
    return (2, *jnp.shape(leaf)) if jnp.iscomplexobj(leaf) else jnp.shape(leaf)


def _hold(x: jax.Array) -> jax.Array:
    """``x``, computed once and not again in every kernel that reads it.

    XLA repeats cheap arithmetic but not a division; the divisor is a one that it does not know.
    """
    if jnp.issubdtype(x.dtype, jnp.unsignedinteger):
        return lax.div(x, jnp.maximum(x >> 31, jnp.ones_like(x)))
    return lax.div(x, jnp.maximum(jnp.sign(x), jnp.ones_like(x)))


def normal(words: chex.Array, shape: tuple[int, ...]) -> jax.Array:
    """Standard normal float32 noise, a function of two words and each element's index.

    Args:
      words: uint32 array of shape (2,), random bits.
      shape: shape of the noise.

    Returns:
      float32 array of the given shape.
    """
    bits = _hash(_index(shape), words)
    total = (bits & 0x7FF) + ((bits >> 11) & 0x7FF) + (bits >> 22)
    # Signed integers convert to floating point in one instruction, unsigned ones do not.
    s = (total.astype(jnp.int32).astype(jnp.float32) - _MEAN_SUM) * 2.0**-10
    square = jnp.square(s)
    polynomial = jnp.full_like(s, _QUANTILE[-1])
    for coefficient in _QUANTILE[-2::-1]:
        polynomial = polynomial * square + coefficient
    return s * polynomial


def _index(shape: tuple[int, ...]) -> jax.Array:
    """Row-major index of each element, modulo 2^32."""
    index = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        stride = math.prod(shape[axis + 1 :]) % 2**32
        index += lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride)
    return index


def _hash(x: jax.Array, words: chex.Array) -> jax.Array:
    """A bijection of 32-bit integers, keyed with two words, whose output bits look random.

    Two rounds of multiplication by an odd constant and of folding the high bits into the low
    ones, the form and the constants that low-bias integer hashes were found to need.
    """
    x = x * jnp.uint32(0x9E3779B9) + words[0]
    x ^= x >> 16
    x = x * jnp.uint32(0x21F0AAAD) + words[1]
    x ^= x >> 15
    x *= jnp.uint32(0x735A2D97)
    return x ^ (x >> 15)
