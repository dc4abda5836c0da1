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

# A pytree of booleans (a prefix of the params), or a function of the params returning one.
BiasMask = TypeAliasType("BiasMask", PyTree | Callable[[Params], PyTree])
# The scale of ASAM's normalization operator: the weight itself, or its convolution filter.
Normalization: TypeAlias = Literal["elementwise", "filterwise"]
# The axis of the output unit, or a function ``(path, leaf) -> axis | None``.
AxisOverride = TypeAliasType("AxisOverride", int | Callable[[KeyPath, Leaf], int | None])
# The number of leading axes that stack layers, or a function ``(path, leaf) -> number``.
StackAxes = TypeAliasType("StackAxes", int | Callable[[KeyPath, Leaf], int])
# Minimum number of axes of a convolution kernel: two spatial, input and output channels.
CONVOLUTION_NDIM = 4


def expand_mask(name: str, mask: BiasMask, params: Params) -> PyTree:
    """A mask (pytree prefix of booleans, or a function of params) as one Boolean per leaf."""

    def expand(value: object, subtree: Params) -> PyTree:
        if not isinstance(value, (bool, np.bool_)):
            raise TypeError(value)
        return jax.tree.map(lambda _: bool(value), subtree, is_leaf=trees.is_none)

    mask = mask(params) if callable(mask) else mask
    try:
        return jax.tree.map(expand, mask, params)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} must be a pytree of booleans that is a prefix of the params, or a function "
            f"of the params that returns one; got {mask!r} for params of structure "
            f"{jax.tree.structure(params)}."
        ) from error


@dataclasses.dataclass(frozen=True)
class Units:
    """How a leaf is divided into units (filters, kernels)."""

    stacked: int  # number of leading axes that stack layers, each with its own units
    axis: int | None  # of a layer, without stacked axes; None: the whole layer is one unit

    def elements(self, ndim: int) -> tuple[int, ...]:
        """The axes of a leaf along which the elements of one unit lie."""
        unit = None if self.axis is None else self.stacked + self.axis
        return tuple(i for i in range(self.stacked, ndim) if i != unit)


def check_stack_axes(value: object) -> None:
    """Raises unless ``value`` is a number of axes or a function."""
    number = isinstance(value, (int, np.integer)) and not isinstance(value, bool) and value >= 0
    if not (number or callable(value)):
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
            f"{jax.tree_util.keystr(path)}: pass a function (path, leaf) that returns 0 for others."
        )
    return int(stacked), jax.ShapeDtypeStruct(np.shape(leaf)[stacked:], jnp.result_type(leaf))


def unit_axes(
    params: Params, override: AxisOverride, *, min_ndim: int, stack_axes: StackAxes = 0
) -> PyTree:
    """The :class:`Units` of each leaf: one below ``min_ndim`` axes, unless a function decides."""

    def units_of(path: KeyPath, leaf: Leaf) -> Units:
        if not trees.is_inexact(leaf):  # None, counters and keys are not normalized
            return Units(0, None)
        stacked, layer = layer_of(stack_axes, path, leaf)
        ndim = np.ndim(layer)
        default = None if callable(override) or ndim < min_ndim else override
        axis = override(path, layer) if callable(override) else default
        if axis is None:
            return Units(stacked, None)
        if not -ndim <= axis < ndim:
            where = jax.tree_util.keystr(path)
            inside = f" in addition to {stacked} that stack layers" if stacked else ""
            raise ValueError(f"axis {axis} is out of range for {where} with {ndim} axes{inside}.")
        return Units(stacked, axis % ndim)

    return jax.tree_util.tree_map_with_path(units_of, params, is_leaf=trees.is_none)


def unit_squares(x: jax.Array, units: Units) -> jax.Array:
    """‖·‖₂² of each unit, broadcastable against the leaf."""
    return jnp.sum(vectors.squared(x), axis=units.elements(x.ndim), keepdims=True)


def unit_norm(x: jax.Array, units: Units) -> jax.Array:
    """‖·‖₂ of each unit, broadcastable against the leaf."""
    return vectors.root(unit_squares(x, units))
