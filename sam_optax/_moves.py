"""Trees of which only the inexact leaves move, the others ``None``."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from sam_optax import _trees


def _is_none(leaf: Any) -> bool:
    return leaf is None


def inexact_only(tree: Any) -> Any:
    """The tree with ``None`` in place of leaves that are not inexact."""
    return jax.tree.map(lambda leaf: leaf if _trees.is_inexact(leaf) else None, tree)


def merge(inexact: Any, tree: Any) -> Any:
    """The leaves of ``inexact``, and of ``tree`` where that has ``None``."""
    return jax.tree.map(lambda a, b: b if a is None else a, inexact, tree, is_leaf=_is_none)


def cast_like(tree: Any, inexact: Any) -> Any:
    """``tree`` in the structure and dtypes of ``inexact``, whose leaves stay where it has none."""

    def cast(old: Any, new: Any) -> Any:
        return _trees.cast_like(new, old) if _trees.is_inexact(new) and old is not None else old

    return jax.tree.map(cast, inexact, tree, is_leaf=_is_none)


def displacement(grads: optax.Updates, params: optax.Params, point: optax.Params) -> Any:
    """``point − params`` where there is a gradient, else ``None``."""

    def subtract(g: Any, p: Any, q: Any) -> jax.Array | None:
        if not (_trees.is_inexact(g) and _trees.is_inexact(p)):
            return None
        return jnp.asarray(q) - jnp.asarray(p)

    return jax.tree.map(subtract, grads, params, point, is_leaf=_is_none)
