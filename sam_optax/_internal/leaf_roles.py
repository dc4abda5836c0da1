"""What a leaf is in its network: a bias, a stack of filters, a set of kernels."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

BiasMask: TypeAlias = Any | Callable[[optax.Params], Any]
"""A pytree of booleans (a prefix of the params), or a function of the params returning one."""

AxisOverride: TypeAlias = int | Callable[[Any, Any], int | None]
"""The axis of the output unit, or a function ``(path, leaf) -> axis | None``."""

_BIAS_NAMES = ("bias", "b")
# Containers that add an entry of their own behind the name of a leaf (Flax NNX).
_BOX_NAMES = ("value", "raw_value")


def _name(entry: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def _is_bias(path: tuple[Any, ...]) -> bool:
    names = [_name(entry) for entry in path]
    while len(names) > 1 and names[-1] in _BOX_NAMES:
        names.pop()
    return bool(names) and names[-1] in _BIAS_NAMES


def _is_none(leaf: Any) -> bool:
    return leaf is None


def expand_mask(name: str, mask: Any, params: optax.Params) -> Any:
    """A mask (pytree prefix of booleans, or a function of params) as one Boolean a leaf."""
    mask = mask(params) if callable(mask) else mask
    try:
        return jax.tree.map(
            lambda m, subtree: jax.tree.map(lambda _: _as_bool(m), subtree, is_leaf=_is_none),
            mask,
            params,
        )
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} must be a pytree of booleans that is a prefix of the params, or a function "
            f"of the params that returns one; got {mask!r} for params of structure "
            f"{jax.tree.structure(params)}."
        ) from error


def _as_bool(value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(value)
    return bool(value)


def bias_leaves(params: optax.Params, bias_mask: BiasMask | None) -> Any:
    """One Boolean a leaf: whether it is a bias."""
    if bias_mask is not None:
        return expand_mask("bias_mask", bias_mask, params)
    return jax.tree_util.tree_map_with_path(
        lambda path, _: _is_bias(path), params, is_leaf=_is_none
    )


def unit_axes(params: optax.Params, override: AxisOverride, *, min_ndim: int) -> Any:
    """For each leaf the axis that indexes its output units, or ``None``.

    Leaves with fewer than ``min_ndim`` axes have none, unless a function says so.
    """

    def axis_of(path: Any, leaf: Any) -> int | None:
        ndim = jnp.ndim(leaf) if leaf is not None else 0
        if callable(override):
            axis = override(path, leaf)
        else:
            axis = override if ndim >= min_ndim else None
        if axis is not None and not -ndim <= axis < ndim:
            raise ValueError(
                f"axis {axis} is out of range for the leaf {jax.tree_util.keystr(path)} with "
                f"{ndim} axes."
            )
        return axis

    return jax.tree_util.tree_map_with_path(axis_of, params, is_leaf=_is_none)


def unit_norm(magnitude: jax.Array, axis: int | None) -> jax.Array:
    """‖·‖₂ of each output unit, broadcastable against the leaf (``None``: one unit)."""
    others = None
    if axis is not None:
        others = tuple(i for i in range(magnitude.ndim) if i != axis % magnitude.ndim)
    return jnp.sqrt(jnp.sum(jnp.square(magnitude), axis=others, keepdims=True))
