"""Exponential moving averages of gradients."""

from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from chex import Numeric
from optax import Updates

from sam_optax._internal import hyperparameters as hp
from sam_optax._internal import trees
from sam_optax._internal.types import Leaf

EmaStart: TypeAlias = Literal["first_gradient", "zero", "bias_corrected"]
"""From g₁, from zero, or from zero with weights that are divided by their sum."""

check_ema_start = hp.name_check("ema_start", EmaStart)


def weights(decay: Numeric, count: jax.Array, ema_start: EmaStart) -> tuple[Numeric, Numeric]:
    """The weights of the old average, of ``count`` gradients, and of the new gradient."""
    if ema_start == "bias_corrected":
        wide = jnp.result_type(float)  # float64 where that is enabled
        decay = jnp.asarray(decay).astype(wide)
        gain = (1 - decay) / (1 - decay ** (count + jnp.int32(1)).astype(wide))
        return 1 - gain, gain
    gain = jnp.asarray(1 - (decay if isinstance(decay, float) else trees.widen(decay)))
    if ema_start == "first_gradient":
        gain = jnp.where(count == 0, jnp.ones_like(gain), gain)
    return decay, gain


def ema(
    average: Updates, grads: Updates, weights: tuple[Numeric, Numeric], removed: Numeric = 0
) -> Updates:
    """The new average, in the dtypes of the old one, which stays where there is no gradient.

    ``removed`` is the multiple of the old average that has been subtracted from ``grads``.
    """

    def leaf(g: Leaf, m: Leaf) -> Leaf:
        if m is None or not trees.is_inexact(g):
            return m
        wide = trees.widen(m).astype(trees.promote(trees.compute_dtype(m), trees.compute_dtype(g)))
        keep, gain, share = (jnp.asarray(x).astype(wide.dtype) for x in (*weights, removed))
        new = (keep + gain * share) * wide + gain * jnp.asarray(g).astype(wide.dtype)
        return trees.cast_like(new, m)

    return jax.tree.map(leaf, grads, average, is_leaf=trees.is_none)
