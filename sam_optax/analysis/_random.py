"""Keys and random directions, sharded like the params."""

import jax

from sam_optax._internal import noise, trees
from sam_optax._internal.types import PyTree


def first_words(key: noise.Key | None) -> jax.Array:
    """The random words of a measure; without a key, always the same."""
    if key is None:
        key = 0
    noise.check_key(key)
    return noise.first_key(key)


def normal_like(words: jax.Array, tree: PyTree) -> PyTree:
    """Standard normal noise for the inexact leaves of a tree, in their compute dtype."""
    draw = noise.normal_tree(words, tree, 1.0)
    return trees.map_inexact(lambda x, z: z.astype(trees.compute_dtype(x)), tree, draw)
