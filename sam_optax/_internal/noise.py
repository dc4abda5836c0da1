"""Random keys as integers in a state, and noise for whole trees of params.

A random start needs its noise twice: at the start and in the perturbation. Storing it would take a
copy of the params. Drawing it with ``jax.random.normal`` costs about fifty times as much as writing
it to memory, and each use of ``jax.random`` in the step costs about half a second of compile time
on a CPU. The noise of :mod:`sam_optax._internal.generator` is fused into its consumers.
"""

import math
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from typing_extensions import TypeAliasType

from sam_optax._internal import devices, generator, trees
from sam_optax._internal.types import Leaf, PyTree

Key = TypeAliasType("Key", chex.PRNGKey | int)
"""A JAX PRNG key, typed or raw, or an integer seed for ``jax.random.key``."""

Draw = TypeAliasType("Draw", Callable[[chex.PRNGKey, tuple[int, ...], DTypeLike], chex.Array])
"""``(key, shape, dtype) -> array`` of independent elements of mean 0 and variance 1."""

# Maximum number of elements of a leaf that shares its draw with others.
SMALL = 2**16
# Increment of the words from one large leaf to the next.
_LEAF_STRIDE = (0x85EBCA6B, 0xC2B2AE35)


def check_key(key: Any) -> None:
    """Raises unless ``key`` is an integer seed or one PRNG key, typed or raw."""
    if _is_seed(key):
        if isinstance(key, int) and not -(2**63) <= key < 2**63:
            raise ValueError(f"key must be a seed of at most 64 bits, got {key!r}.")
        return
    dtype = getattr(key, "dtype", None)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    raw = dtype == jnp.uint32
    if not (typed and key.shape == ()) and not (raw and key.ndim == 1):
        traced = isinstance(key, jax.core.Tracer)
        hint = " Inside optax.inject_hyperparams name it in static_args." if traced else ""
        raise TypeError(
            "key must be an integer seed or one PRNG key, such as jax.random.key(0) or "
            f"jax.random.PRNGKey(0), got {key!r}.{hint}"
        )


def _is_seed(key: Any) -> bool:
    if isinstance(key, bool):
        return False
    if isinstance(key, jax.Array | np.ndarray):
        return key.shape == () and jnp.issubdtype(key.dtype, jnp.integer)
    return isinstance(key, int | np.integer)


def first_key(key: Key) -> jax.Array:
    """The state of a sequence of draws, from a JAX key or a seed: uint32 of shape (2,)."""
    key = jax.random.key(key) if _is_seed(key) else key
    assert not isinstance(key, int)
    if jnp.issubdtype(key.dtype, jnp.unsignedinteger) and key.size == 4:
        key = jax.random.wrap_key_data(key, impl="rbg")  # a raw key of another PRNG implementation
    # Clone the key, since init may be called again and jax.debug_key_reuse would raise an error.
    return jax.random.bits(jax.random.clone(key), (2,), jnp.uint32)


def next_key(key: chex.Array) -> jax.Array:
    """The key of the next draw."""
    return generator.hash_words(generator.bits(key, (2,)), key[::-1])


def fold_in(key: chex.Array, index: chex.Numeric | None) -> chex.Array:
    """A key for one of several draws in the same step (of devices, of groups of the batch)."""
    if index is None:
        return key
    words = jnp.asarray(index).astype(jnp.uint32) * np.uint32(2) + generator.index((2,))
    words = generator.hash_words(words, key)
    return hold(generator.hash_words(words, key[::-1] + np.uint32(_LEAF_STRIDE[0])))


def of_shards(
    draw: Callable[[chex.Numeric | None], PyTree], tree: PyTree, axis_name: devices.AxisName | None
) -> PyTree:
    """``draw(index)`` for a tree whose leaves may be cut along an axis of devices.

    Each shard of a cut leaf gets its own draw, and leaves that are the same on all devices the same
    one. (Without ``check_vma`` all leaves are taken for cut ones.)
    """
    if axis_name is None:
        return draw(None)
    return jax.tree.map(
        lambda leaf, one, other: one if devices.is_replicated(leaf, axis_name) else other,
        tree,
        draw(None),
        draw(devices.draw_index(axis_name, None, ())),
        is_leaf=trees.is_none,
    )


def bits_tree(key: chex.Array, tree: PyTree, one_per_leaf: bool = False) -> PyTree:
    """32 random bits for each element of each array of a tree.

    Args:
      key: uint32 words.
      tree: pytree with the shapes of the bits; ``None`` leaves get no bits.
      one_per_leaf: whether to draw a single number, a scalar, for each leaf.
    """
    words, one = key, _one(key)

    def draw(leaf: Leaf) -> jax.Array | None:
        nonlocal words
        if leaf is None:
            return None
        words = (words + np.array(_LEAF_STRIDE, np.uint32)) // one
        if one_per_leaf:
            return generator.bits(words, ())
        # Zeros like the leaf give the bits its sharding, if shardings are part of the types.
        return generator.bits(words, jnp.shape(leaf)) | jnp.zeros_like(leaf, dtype=jnp.uint32)

    return jax.tree.map(draw, tree, is_leaf=trees.is_none)


def check_draw(draw: object) -> None:
    """Raises unless ``draw`` is a function or ``None``."""
    if draw is not None and not callable(draw):
        raise TypeError(
            "draw must be a function (key, shape, dtype) -> array, such as jax.random.normal, or "
            f"None for the library's own generator, got {draw!r}."
        )


def normal_tree(
    key: chex.Array, params: PyTree, scale: chex.Numeric, draw: Draw | None = None
) -> PyTree:
    """Normal noise of standard deviation ``scale`` for the inexact leaves of a tree.

    For a complex leaf, the real and imaginary parts each have half of the variance.

    Leaves of up to ``SMALL`` elements share one draw that is kept in memory, because compiling a
    separate kernel would take too long for a small leaf. Each larger leaf has a separate draw,
    which is repeated wherever it is read. Words and offsets are passed from leaf to leaf as runtime
    values: with constants, no two leaves could share a compiled kernel.

    Args:
      key: uint32 words.
      params: the tree.
      scale: standard deviation.
      draw: generator to use in place of the library's.
    """
    sample = generator.normal if draw is None else _checked(draw)

    leaves, structure = jax.tree.flatten(params, is_leaf=trees.is_none)
    shapes = [_draw_shape(leaf) for leaf in leaves]
    sizes = [0 if shape is None else math.prod(shape) for shape in shapes]
    shared = hold(sample(key, (sum(size for size in sizes if size <= SMALL),)) * scale)
    words, one = key, _one(key)
    offset = jnp.minimum(key[0], 0)  # unsigned: no code for negative offsets is compiled
    noise: list[jax.Array | None] = []
    for leaf, shape, size in zip(leaves, shapes, sizes, strict=True):
        if shape is None:
            noise.append(None)
            continue
        if size > SMALL:
            words = (words + np.array(_LEAF_STRIDE, np.uint32)) // one
            values = sample(words, shape) * scale
        else:
            values = lax.dynamic_slice(shared, (offset,), (size,)).reshape(shape)
            offset = (offset + np.uint32(size)) // one
        if jnp.iscomplexobj(leaf):
            values = lax.complex(values[0], values[1]) * np.complex64(0.5**0.5)
        noise.append(values)
    return jax.tree.unflatten(structure, noise)


def _checked(draw: Draw) -> Callable[[chex.Array, tuple[int, ...]], jax.Array]:
    def sample(words: chex.Array, shape: tuple[int, ...]) -> jax.Array:
        # A threefry key consists of two words; jax.random.key may use another implementation.
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        values = draw(key, shape, jnp.float32)
        if jnp.shape(values) != shape:
            raise ValueError(
                f"draw must return an array of the shape it is asked for, {shape}, got one of "
                f"shape {jnp.shape(values)}."
            )
        return jnp.asarray(values).astype(jnp.float32)

    return sample


def _draw_shape(leaf: Leaf) -> tuple[int, ...] | None:
    """Shape of the real noise for a leaf: two parts if complex, none for a non-float leaf."""
    if not trees.is_inexact(leaf):
        return None
    return (2, *jnp.shape(leaf)) if jnp.iscomplexobj(leaf) else jnp.shape(leaf)


def hold(x: jax.Array) -> jax.Array:
    """``x``, computed once and stored instead of recomputed in every kernel that reads it.

    XLA repeats cheap arithmetic in every kernel that needs the result, because that is faster than
    reading it from memory. A division counts as expensive, so its result is computed once and
    stored. The divisor here is always 1, but the compiler cannot know.
    (``lax.optimization_barrier`` should have this effect, but XLA for CPUs removes it before it
    decides what to repeat: with it the step of a small vision transformer has 1.8 times the
    operations and twice the instructions to compile.)
    """
    if jnp.issubdtype(x.dtype, jnp.unsignedinteger):
        return x // jnp.maximum(x >> 31, 1)
    # Not a scalar: the compiler would multiply by its reciprocal instead of dividing.
    return x / jnp.maximum(jnp.sign(x), 1)


def _one(words: chex.Array) -> jax.Array:
    """1, but unknown to the compiler, so that the result of a division by it is stored."""
    return hold(jnp.maximum(words[0] >> 31, 1))
