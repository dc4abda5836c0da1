"""The role of a leaf in its network: a set of filters or kernels, or a stack of such layers."""

import dataclasses
from collections.abc import Callable
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from optax import Params
from typing_extensions import TypeAliasType

from sam_optax._internal import trees, vectors
from sam_optax._internal.types import KeyPath, Leaf, PyTree

BiasMask = TypeAliasType("BiasMask", PyTree | Callable[[Params], PyTree])
"""A pytree of booleans (a prefix of the params), or a function of the params returning one."""

Normalization: TypeAlias = Literal["elementwise", "filterwise"]
"""The scale of ASAM's normalization operator: the weight itself, or its convolution filter."""

AxisOverride = TypeAliasType("AxisOverride", int | Callable[[KeyPath, Leaf], int | None])
"""The axis of the output unit, or a function ``(path, leaf) -> axis | None``."""

StackAxes = TypeAliasType("StackAxes", int | Callable[[KeyPath, Leaf], int])
"""The number of leading axes that stack layers, or a function ``(path, leaf) -> number``."""

CONVOLUTION_NDIM = 4
"""Minimum number of axes of a convolution kernel: two spatial, input and output channels."""


def expand_mask(name: str, mask: BiasMask, params: Params) -> PyTree:
    """A mask (pytree prefix of booleans, or a function of params) as one Boolean per leaf."""
    mask = mask(params) if callable(mask) else mask
    try:
        return jax.tree.map(
            lambda m, subtree: jax.tree.map(lambda _: _as_bool(m), subtree, is_leaf=trees.is_none),
            mask,
            params,
        )
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} must be a pytree of booleans that is a prefix of the params, or a function "
            f"of the params that returns one; got {mask!r} for params of structure "
            f"{jax.tree.structure(params)}."
        ) from error


def _as_bool(value: object) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(value)
    return bool(value)


@dataclasses.dataclass(frozen=True)
class Units:
    """How a leaf is divided into units (filters, kernels).

    Attributes:
      stacked: number of leading axes that stack layers, each with its own units.
      axis: the axis of a layer, not counting stacked axes, that indexes its units; ``None``: the
        whole layer is one unit.
    """

    stacked: int
    axis: int | None

    def elements(self, ndim: int) -> tuple[int, ...]:
        """The axes of a leaf along which the elements of one unit lie."""
        unit = None if self.axis is None else self.stacked + self.axis
        return tuple(i for i in range(self.stacked, ndim) if i != unit)


def check_stack_axes(value: object) -> None:
    """Raises unless ``value`` is a number of axes or a function."""
    if callable(value):
        return
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
        raise ValueError(
            f"stack_axes must be an integer >= 0, the number of leading axes that stack layers, "
            f"or a function (path, leaf) that returns one; got {value!r}."
        )


def layer_of(stack_axes: StackAxes, path: KeyPath, leaf: Leaf) -> tuple[int, Leaf]:
    """The number of axes that stack layers, and the leaf of a single layer."""
    stacked = stack_axes(path, leaf) if callable(stack_axes) else stack_axes
    check_stack_axes(stacked)
    if not stacked:
        return 0, leaf
    if stacked > np.ndim(leaf):
        raise ValueError(
            f"stack_axes={stacked} exceeds the {np.ndim(leaf)} axes of the leaf "
            f"{jax.tree_util.keystr(path)}: pass a function (path, leaf) that returns 0 for leaves "
            "that are not stacked."
        )
    return int(stacked), jax.ShapeDtypeStruct(np.shape(leaf)[stacked:], jnp.result_type(leaf))


def unit_axes(
    params: Params, override: AxisOverride, *, min_ndim: int, stack_axes: StackAxes = 0
) -> PyTree:
    """The :class:`Units` of each leaf.

    Leaves with fewer than ``min_ndim`` axes have no axis of units, unless a function says so.
    Axes are counted within a layer, without those that stack layers.
    """

    def units_of(path: KeyPath, leaf: Leaf) -> Units:
        if not trees.is_inexact(leaf):  # None, counters and keys are not normalized
            return Units(0, None)
        stacked, layer = layer_of(stack_axes, path, leaf)
        ndim = np.ndim(layer)
        if callable(override):
            axis = override(path, layer)
        else:
            axis = override if ndim >= min_ndim else None
        if axis is None:
            return Units(stacked, None)
        if not -ndim <= axis < ndim:
            inside = f" in addition to {stacked} that stack layers" if stacked else ""
            raise ValueError(
                f"axis {axis} is out of range for the leaf {jax.tree_util.keystr(path)} with "
                f"{ndim} axes{inside}."
            )
        return Units(stacked, axis % ndim)

    return jax.tree_util.tree_map_with_path(units_of, params, is_leaf=trees.is_none)


def unit_squares(x: jax.Array, units: Units) -> jax.Array:
    """‖·‖₂² of each unit, broadcastable against the leaf."""
    return jnp.sum(vectors.squared(x), axis=units.elements(x.ndim), keepdims=True)


def unit_norm(x: jax.Array, units: Units) -> jax.Array:
    """‖·‖₂ of each unit, broadcastable against the leaf."""
    return vectors.root(unit_squares(x, units))
