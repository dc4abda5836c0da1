"""Skips a step whose gradients are not finite."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from optax import Updates

from sam_optax._internal import control_flow, devices, trees
from sam_optax._internal.devices import AxisName
from sam_optax._internal.types import Leaf, PyTree


def all_finite(tree: PyTree, axis_name: AxisName | None = None) -> jax.Array:
    """Whether every element of every inexact leaf is finite, on all devices of the axis."""
    # The maximum is NaN if any element is.
    leaves = [leaf for leaf in trees.largest_first(trees.inexact_leaves(tree)) if jnp.size(leaf)]
    bad = [(~jnp.isfinite(jnp.max(jnp.abs(leaf)))).astype(jnp.int32) for leaf in leaves]
    return devices.all_true(trees.sum_scalars(bad, jnp.int32) == 0, axis_name)


def unless_nonfinite(
    finite: jax.Array, descend: Callable[[], tuple[Updates, PyTree]], skipped: PyTree
) -> tuple[Updates, PyTree]:
    """``descend()``, or zero updates and the state ``skipped`` in the dtypes of the new state."""
    descend = control_flow.trace_once(descend, finite)

    def unchanged(shape: Leaf) -> Leaf:
        # −0.0 is the additive identity; adding +0.0 flips the sign of −0.0.
        zeros = devices.zeros(shape)
        return -zeros if trees.is_inexact(shape) else zeros

    def skip() -> tuple[Updates, PyTree]:
        updates, state = jax.eval_shape(descend)
        as_new = trees.map_inexact(lambda old, new: old.astype(new.dtype), skipped, state)
        return jax.tree.map(unchanged, updates), as_new

    return control_flow.cond(finite, descend, skip)
