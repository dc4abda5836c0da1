"""Device axes: averages over them, and values that are local to one device."""

from typing import TypeAlias

import jax
import jax.numpy as jnp
from chex import Numeric
from jax import lax
from optax import Updates

from sam_optax._internal import trees
from sam_optax._internal.types import Leaf, PyTree

AxisName: TypeAlias = str | tuple[str, ...]
"""The name of an axis of devices, or of several; ``()`` is none, and so is ``None`` in ``Axes``."""
Axes: TypeAlias = AxisName | None


def pmean(tree: PyTree, axis_name: Axes) -> PyTree:
    """The mean of the inexact leaves over the axis."""
    if not _axes(axis_name):
        return tree
    return trees.map_inexact(lambda leaf: lax.pmean(leaf, axis_name), tree)


def _axes(axis_name: Axes) -> tuple[str, ...]:
    if axis_name is None:
        return ()
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)


def draw_index(axis_name: Axes, groups: int | None, group: tuple[Numeric, ...]) -> Numeric | None:
    """A distinct index for each device's and group's random draw; ``None`` for a single draw."""
    if not _axes(axis_name) and not group:
        return None
    index = jnp.zeros((), jnp.int32)
    for axis in _axes(axis_name):
        index = index * lax.psum(1, axis) + lax.axis_index(axis)
    for i in group:
        index = index * (groups or 1) + i
    return index


def local(tree: PyTree, axis_name: Axes) -> PyTree:
    """Marks a tree as local to each device, so that gradients with respect to it are local.

    Under ``jax.shard_map`` with ``check_vma=True``, the gradient with respect to a replicated value
    is summed over the axis, but ``jax.grad(loss)(sam_optax.local(params, axis_name))`` is the
    gradient of this device. Elsewhere (``jax.pmap``, ``check_vma=False``) gradients are always
    local, and this function is the identity.

    Args:
      tree: a pytree of arrays.
      axis_name: the axis or axes of the devices.

    Returns:
      The same values.

    Example:
      >>> import jax, jax.numpy as jnp, sam_optax
      >>> jax.pmap(lambda w: sam_optax.local(w, "batch"), axis_name="batch")(jnp.ones(1))
      Array([1.], dtype=float32)
    """

    def cast(leaf: Leaf) -> Leaf:
        for axis in _axes(axis_name):
            leaf = _vary(leaf, axis)
        return leaf

    return trees.map_inexact(cast, tree)


def _vary(leaf: Leaf, axis: str) -> Leaf:
    if axis not in manual_axes(least=1):  # of vmap, whose types show nothing
        return leaf
    try:
        if hasattr(lax, "pcast"):
            return lax.pcast(leaf, axis, to="varying")
        return lax.pvary(leaf, axis) if hasattr(lax, "pvary") else leaf
    except ValueError:  # already varying
        return leaf


def is_replicated(leaf: Leaf, axis_name: Axes) -> bool:
    """Whether the type system knows that all devices hold the same value."""
    known = hasattr(jax, "typeof") and isinstance(leaf, jax.Array)
    return known and any(
        jax.typeof(_vary(leaf, axis)) != jax.typeof(leaf) for axis in _axes(axis_name)
    )


def shows_variation(axis_name: AxisName) -> bool:
    """Whether types show what varies along the axis: ``shard_map`` with ``check_vma=True``."""
    return is_replicated(jnp.zeros(()), axis_name)


def manual_axes(least: int = 2) -> tuple[str, ...]:
    """Axes of ``least`` devices or more around the trace: of ``shard_map``, of a named ``pmap``."""
    if not hasattr(jax.sharding, "get_abstract_mesh"):
        return ()
    mesh = jax.sharding.get_abstract_mesh()
    axes = getattr(mesh, "manual_axes", ())
    return tuple(a for a in axes if mesh.shape[a] >= least and a != "_internal_pmap_axis_name")


def require_bound(name: str, axis_name: Axes) -> None:
    """Raises unless the axis is that of ``pmap`` or ``shard_map`` around the call."""
    for axis in _axes(axis_name):
        try:
            lax.axis_index(axis)
        except NameError as error:
            raise ValueError(
                f"{name}={axis_name!r} names an axis that is not bound here: call update inside "
                f"jax.shard_map over a mesh with that axis, or jax.pmap(..., axis_name={axis!r}). "
                "Under jit with sharded arrays no axis is needed: leave it out."
            ) from error


def check_local(grads: Updates, axis_name: Axes) -> None:
    """Raises for a gradient that is known to be the same on all devices of the axis."""
    if any(is_replicated(leaf, axis_name) for leaf in trees.inexact_leaves(grads)):
        raise ValueError(
            f"grads must be each device's own gradient, but are the same on all devices of "
            f"axis_name={axis_name!r}: they have been averaged, or are summed over the axis, as "
            "the gradient with respect to replicated params is under jax.shard_map with "
            "check_vma=True. Pass None, or the gradient at sam_optax.local(params, axis_name)."
        )


def zeros(shape: Leaf) -> jax.Array:
    """Zeros with the shape, dtype, sharding and varying axes of a ``jax.ShapeDtypeStruct``."""
    if shape.dtype == jax.dtypes.float0:
        return trees.zeros_like(shape)
    result = jnp.zeros_like(shape)
    manual = getattr(shape, "manual_axis_type", None)
    for axis in getattr(manual, "varying", None) or getattr(shape, "vma", None) or ():
        result = _vary(result, axis)
    return result


def all_true(flag: jax.Array, axis_name: Axes) -> jax.Array:
    """Whether the flag is true on all devices of the axis."""
    if not _axes(axis_name):
        return flag
    return lax.psum(jnp.where(local(flag, axis_name), 0, 1), axis_name) == 0
