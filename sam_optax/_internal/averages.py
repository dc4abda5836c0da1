"""Exponential moving averages of gradients."""

from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from chex import Numeric
from jax.typing import DTypeLike
from optax import Updates

from sam_optax._internal import hyperparameters as hp
from sam_optax._internal import trees
from sam_optax._internal.types import Leaf

EmaStart: TypeAlias = Literal["first_gradient", "zero", "bias_corrected"]
"""From g₁, from zero, or from zero with weights that are divided by their sum."""

check_ema_start = hp.name_check("ema_start", EmaStart)


def ema(
    average: Updates,
    grads: Updates,
    decay: Numeric,
    count: jax.Array | None = None,
    ema_start: EmaStart = "zero",
    removed: Numeric = 0,
) -> Updates:
    """The new average, in the dtypes of the old one, which stays where there is no gradient.

    ``count`` gradients are in the old average, 0 if none; ``grads`` lack ``removed`` times it.
    """

    def weights(dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
        """Of the old average and of the new gradient."""
        if ema_start == "bias_corrected":
            exact = jnp.asarray(decay).astype(jnp.result_type(float))  # float64, if enabled
            number = (jnp.asarray(count) + 1).astype(exact.dtype)
            corrected = (1 - exact) / (1 - exact**number)
            return (1 - corrected).astype(dtype), corrected.astype(dtype)
        keep = jnp.asarray(decay).astype(dtype)
        gain = jnp.asarray(1 - decay).astype(dtype) if isinstance(decay, float) else 1 - keep
        if ema_start == "first_gradient":
            gain = jnp.where(count == 0, jnp.ones_like(gain), gain)
        return keep, gain

    def leaf(g: Leaf, m: Leaf) -> Leaf:
        if m is None or not trees.is_inexact(g):
            return m
        wide = trees.widen(m).astype(trees.promote(trees.compute_dtype(m), trees.compute_dtype(g)))
        keep, gain = weights(wide.dtype)
        keep = keep + gain * jnp.asarray(removed).astype(wide.dtype)
        return trees.cast_like(keep * wide + gain * jnp.asarray(g).astype(wide.dtype), m)

    return jax.tree.map(leaf, grads, average, is_leaf=trees.is_none)
