"""A clear error for trees that cannot be differentiated."""

import jax
import jax.numpy as jnp

from sam_optax._internal.types import Leaf, PyTree


def require_differentiable(params: PyTree, remedy: str) -> None:
    """Raises for integer, Boolean and key leaves, and for leaves that are not arrays.

    Args:
      params: the tree with respect to which a loss is to be differentiated.
      remedy: how to filter the tree, for the message.

    Raises:
      TypeError: a leaf cannot be differentiated.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not _is_differentiable(leaf):
            kind = getattr(leaf, "dtype", type(leaf).__name__)
            raise TypeError(
                f"the loss cannot be differentiated with respect to the leaf "
                f"{jax.tree_util.keystr(path) or 'params'} of type {kind}: filter it out. {remedy}"
            )


def _is_differentiable(leaf: Leaf) -> bool:
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return isinstance(leaf, (float, complex))
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return False
    # Flax's fp8 statistics have an extended dtype that can be differentiated.
    return jnp.issubdtype(dtype, jnp.inexact) or jnp.issubdtype(dtype, jax.dtypes.extended)
