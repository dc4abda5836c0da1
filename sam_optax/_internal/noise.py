"""Random keys as integers in a state, and noise for whole trees of params.

A random start needs its noise twice: at the start and in the perturbation. Storing it would take a
copy of the params. ``jax.random.normal`` costs about fifty times as much as writing it to memory,
and each use in the step about half a second of compile time on a CPU. The noise of
:mod:`sam_optax._internal.generator` is fused into its consumers.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from chex import Array, Numeric, PRNGKey
from jax import lax
from jax.typing import DTypeLike
from typing_extensions import TypeAliasType

from sam_optax._internal import devices, generator, trees
from sam_optax._internal.generator import Words
from sam_optax._internal.types import Leaf, PyTree

# A JAX PRNG key, typed or raw, or an integer seed for ``jax.random.key``.
Key = TypeAliasType("Key", PRNGKey | int)
# ``(key, shape, dtype) -> array`` of independent elements of mean 0 and variance 1.
Draw = TypeAliasType("Draw", Callable[[PRNGKey, tuple[int, ...], DTypeLike], Array])

SMALL = 2**16  # maximum number of elements of a leaf that shares its draw with others
_LEAF_STRIDE = (0x85EBCA6B, 0xC2B2AE35)  # increment of the words from one large leaf to the next


def check_key(key: Any) -> None:
    """Raises unless ``key`` is an integer seed or one PRNG key, typed or raw."""
    if _is_seed(key):
        if isinstance(key, int) and not -(2**63) <= key < 2**63:
            raise ValueError(f"key must be a seed of at most 64 bits, got {key!r}.")
        return
    dtype, ndim = getattr(key, "dtype", None), getattr(key, "ndim", None)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not (typed and ndim == 0) and not (dtype == jnp.uint32 and ndim == 1):
        traced = isinstance(key, jax.core.Tracer)
        hint = " Inside optax.inject_hyperparams name it in static_args." if traced else ""
        raise TypeError(
            "key must be an integer seed or one PRNG key, such as jax.random.key(0) or "
            f"jax.random.PRNGKey(0), got {key!r}.{hint}"
        )


def _is_seed(key: Any) -> bool:
    if isinstance(key, jax.Array | np.ndarray):
        return key.shape == () and jnp.issubdtype(key.dtype, jnp.integer)
    return isinstance(key, int | np.integer) and not isinstance(key, bool)


def first_key(key: Key) -> jax.Array:
    """The first of a sequence of keys, from a JAX key or a seed: two uint32 words."""
    key = jax.random.key(key) if _is_seed(key) else key
    assert not isinstance(key, int)
    if jnp.issubdtype(key.dtype, jnp.unsignedinteger) and key.size == 4:
        key = jax.random.wrap_key_data(key, impl="rbg")  # a raw key of another PRNG implementation
    # Clone the key, since init may be called again and jax.debug_key_reuse would raise an error.
    return jax.random.bits(jax.random.clone(key), (2,), jnp.uint32)


def next_key(key: Array) -> jax.Array:
    """The key of the next draw."""
    return generator.hash_words(generator.bits(key, (2,)), key[::-1])


def fold_in(key: Array, index: Numeric | None) -> Array:
    """A key for one of several draws in the same step (of devices, of groups of the batch)."""
    if index is None:
        return key
    words = jnp.asarray(index).astype(jnp.uint32) * np.uint32(2) + generator.index((2,))
    words = generator.hash_words(words, key)
    return hold(generator.hash_words(words, key[::-1] + np.uint32(_LEAF_STRIDE[0])))


def of_shards(
    draw: Callable[[Numeric | None], PyTree], tree: PyTree, axis_name: devices.Axes
) -> PyTree:
    """``draw(index)`` for a tree: one for each shard of a leaf that is cut along the axis.

    Leaves that are the same on all devices share one; without ``check_vma`` none is known to be.
    """
    if axis_name is None:
        return draw(None)

    def of_leaf(leaf: Leaf, common: Leaf, own: Leaf) -> Leaf:
        return common if devices.is_replicated(leaf, axis_name) else own

    own = draw(devices.draw_index(axis_name, None, ()))
    return jax.tree.map(of_leaf, tree, draw(None), own, is_leaf=trees.is_none)


def bits_tree(key: Array, tree: PyTree, one_per_leaf: bool = False) -> PyTree:
    """32 random bits for each element of each array of a tree, or one scalar per leaf."""
    words, one = (key[0], key[1]), _one(key)

    def draw(leaf: Leaf) -> jax.Array | None:
        nonlocal words
        if leaf is None:
            return None
        words = _of_next_leaf(words, one)
        if one_per_leaf:
            return generator.bits(words, ())
        # Zeros like the leaf give the bits its sharding, if shardings are part of the types.
        return generator.bits(words, jnp.shape(leaf)) | jnp.zeros_like(leaf, dtype=jnp.uint32)

    return jax.tree.map(draw, tree, is_leaf=trees.is_none)


def normal_tree(key: Array, params: PyTree, scale: Numeric, draw: Draw | None = None) -> PyTree:
    """Normal noise of standard deviation ``scale`` for the inexact leaves of a tree.

    For a complex leaf, the real and imaginary parts each have half of the variance.

    Leaves of up to ``SMALL`` elements share one draw that is kept in memory, because a kernel for
    each would take long to compile. A larger leaf has its own, repeated wherever it is read. Words
    and offsets are runtime values: with constants, no two leaves could share a compiled kernel.
    """
    sample = generator.normal if draw is None else _checked(draw)
    leaves, structure = jax.tree.flatten(params, is_leaf=trees.is_none)
    shapes = [_draw_shape(leaf) for leaf in leaves]
    sizes = [0 if shape is None else math.prod(shape) for shape in shapes]
    shared = hold(sample(key, (sum(size for size in sizes if size <= SMALL),)) * scale)
    words, one = (key[0], key[1]), _one(key)
    offset = jnp.minimum(key[0], 0)  # unsigned: no code for negative offsets is compiled
    noise: list[jax.Array | None] = []
    for leaf, shape, size in zip(leaves, shapes, sizes, strict=True):
        if shape is None:
            noise.append(None)
            continue
        if size > SMALL:
            words = _of_next_leaf(words, one)
            values = sample(words, shape) * scale
        else:
            values = lax.dynamic_slice(shared, (offset,), (size,)).reshape(shape)
            offset = (offset + np.uint32(size)) // one
        if jnp.iscomplexobj(leaf):
            values = lax.complex(values[0], values[1]) * np.complex64(0.5**0.5)
        noise.append(values)
    return jax.tree.unflatten(structure, noise)


def _of_next_leaf(words: tuple[Array, Array], one: jax.Array) -> tuple[Array, Array]:
    # As two scalars: compilers for TPUs give each array of two words 16 KiB of memory.
    first, second = map(np.uint32, _LEAF_STRIDE)
    return (words[0] + first) // one, (words[1] + second) // one


def _checked(draw: Draw) -> Callable[[Words, tuple[int, ...]], jax.Array]:
    def sample(words: Words, shape: tuple[int, ...]) -> jax.Array:
        # A threefry key consists of two words; jax.random.key may use another implementation.
        key = jax.random.wrap_key_data(jnp.stack(words), impl="threefry2x32")
        values = draw(key, shape, jnp.float32)
        if jnp.shape(values) != shape:
            found = f"{shape}, got one of shape {jnp.shape(values)}."
            raise ValueError(f"draw must return an array of the shape it is asked for, {found}")
        return jnp.asarray(values).astype(jnp.float32)

    return sample


def _draw_shape(leaf: Leaf) -> tuple[int, ...] | None:
    """Shape of the real noise for a leaf: two parts if complex, none for a non-float leaf."""
    if not trees.is_inexact(leaf):
        return None
    return (2, *jnp.shape(leaf)) if jnp.iscomplexobj(leaf) else jnp.shape(leaf)


def hold(x: jax.Array) -> jax.Array:
    """``x``, computed once and stored instead of recomputed in every kernel that reads it.

    XLA repeats cheap arithmetic in every kernel that needs the result. A division counts as
    expensive, so its result is stored; the divisor is always 1, but the compiler cannot know.
    (XLA for CPUs removes ``lax.optimization_barrier`` before it decides what to repeat: with it the
    step of a small vision transformer has 1.8 times the operations and twice the instructions to
    compile.)
    """
    if jnp.issubdtype(x.dtype, jnp.unsignedinteger):
        return x // jnp.maximum(x >> 31, 1)
    # Not a scalar: the compiler would multiply by its reciprocal instead of dividing.
    return x / jnp.maximum(jnp.sign(x), 1)


def _one(words: Array) -> jax.Array:
    """1, but unknown to the compiler, so that the result of a division by it is stored."""
    return hold(jnp.maximum(words[0] >> 31, 1))
