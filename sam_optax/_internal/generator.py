"""Random words and normal noise: each element is a function of its index and of two words.

Element i of a draw is a keyed hash of i. A kernel that reads the noise computes it in place, with
some twenty arithmetic operations: it takes no memory, has the sharding of its consumer, and can be
drawn again at any time.

Tested with 10⁷ elements and two keys (``tests/internal/test_generator.py`` repeats it with fewer):
the words are uniform, the moments of the normal values are within 1.6 standard deviations of those
expected, and neighbours, leaves, steps, devices and seeds are uncorrelated (below 2.8).

Limits. There are 5,118 distinct values, all of magnitude below 4.7; the Kolmogorov–Smirnov distance
to the normal distribution is 6.4e-4 (4e-4 by construction). The hash is a bijection of the index,
so no word occurs twice in a draw (of 10⁷ independent words, 11,642 pairs would be equal), and a
draw of more than 2³² elements repeats itself. Two draws whose first words are equal and whose
second words differ in one bit are correlated (by 0.2 to 0.4); keys come from a hash of both words,
and leaves differ in both. It is not for cryptography or integrals to four digits. ``jax.random``,
which random starts accept as ``draw``, has none of these limits but takes more time and memory.
"""

import math
from typing import TypeAlias

import jax
import jax.numpy as jnp
from chex import Array
from jax import lax

# Odd polynomial in s, the centred sum, divided by 2^10, of integers uniform on [0, 2^11), [0, 2^11)
# and [0, 2^10). The coefficients are a least-squares fit of the normal quantile function, weighted
# by the exact distribution of s and scaled to variance 1. The distribution function is within 4e-4
# of the normal one, the kurtosis is 2.9997.
_QUANTILE = (1.09911499, -0.0170216267, 0.0170709122, 0.00441047238, -0.00233205256, 0.000283106587)
_MEAN_SUM = 2047 / 2 + 2047 / 2 + 1023 / 2
Words: TypeAlias = Array | tuple[Array, Array]
"""Two uint32 words, as an array or as two scalars."""


def index(shape: tuple[int, ...]) -> jax.Array:
    """Row-major index of each element, modulo 2^32."""
    result = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        stride = math.prod(shape[axis + 1 :]) % 2**32
        result += lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride)
    return result


def hash_words(x: jax.Array, words: Words) -> jax.Array:
    """A bijection of 32-bit integers, keyed with two words, whose output bits look random."""
    # With the form and constants of published low-bias integer hashes.
    x = x * jnp.uint32(0x9E3779B9) + words[0]
    x ^= x >> 16
    x = x * jnp.uint32(0x21F0AAAD) + words[1]
    x ^= x >> 15
    x *= jnp.uint32(0x735A2D97)
    return x ^ (x >> 15)


def bits(words: Words, shape: tuple[int, ...]) -> jax.Array:
    """32 random bits for each element, uint32 of the given shape."""
    return hash_words(index(shape), words)


def uniform(bits: Array) -> jax.Array:
    """float32, uniform on [0, 1) in steps of 2^-24, from 32 random bits."""
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)


def normal(words: Words, shape: tuple[int, ...]) -> jax.Array:
    """Standard normal float32 noise of the given shape, from two uint32 words."""
    word = bits(words, shape)
    total = (word & 0x7FF) + ((word >> 11) & 0x7FF) + (word >> 22)
    # Signed integers convert to floating point in one instruction; unsigned ones do not.
    s = (total.astype(jnp.int32).astype(jnp.float32) - _MEAN_SUM) * 2.0**-10
    square = jnp.square(s)
    polynomial = jnp.full_like(s, _QUANTILE[-1])
    for coefficient in _QUANTILE[-2::-1]:
        polynomial = polynomial * square + coefficient
    return s * polynomial
