"""Keys and random directions, which are sharded as the params are."""

from typing import Any

import chex
import jax
import jax.numpy as jnp

from sam_optax._internal import noise, trees


def first_words(key: chex.PRNGKey | None) -> jax.Array:
    """The random words that a measure starts from; without a key always the same."""
    if key is None:
        key = jax.random.key(0)
    dtype = getattr(key, "dtype", None)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not (typed and key.shape == ()) and not (dtype == jnp.uint32 and key.ndim == 1):
        raise TypeError(f"key must be one PRNG key, such as jax.random.key(0), got {key!r}.")
    return noise.first_key(key)


def normal_like(words: jax.Array, tree: Any) -> Any:
    """Standard normal noise for the inexact leaves of a tree, in their compute dtype."""
    draw = noise.normal_tree(words, tree, 1.0)
    return trees.map_inexact(lambda x, z: z.astype(trees.compute_dtype(x)), tree, draw)
