"""Dropping a step whose gradients are not finite."""

from typing import Any

import jax
import jax.numpy as jnp

from sam_optax._internal import trees


def select(finite: jax.Array, new: Any, old: Any) -> Any:
    """``new`` if the step counts, else ``old`` in the dtypes of ``new``.

    Both are computed: each element is chosen where it is written, which costs no pass over memory.
    """

    def leaf(a: Any, b: Any) -> Any:
        if a is b or not trees.is_device_array(a):
            return a
        if trees.is_inexact(a):
            b = trees.cast_like(jnp.asarray(b), a)
        return jnp.where(finite, a, b)

    return jax.tree.map(leaf, new, old)


def no_updates(updates: Any) -> Any:
    """Updates that leave every number as it is.

    −0.0 is the additive identity; adding +0.0 flips the sign of −0.0.
    """

    def leaf(u: Any) -> Any:
        return jnp.full_like(u, -0.0) if trees.is_inexact(u) else trees.zeros_like(u)

    return jax.tree.map(leaf, updates)
