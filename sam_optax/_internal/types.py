"""Type aliases for what Python's types cannot express: pytrees, and whatever a caller passes."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax

PyTree: TypeAlias = Any
"""Any pytree, with arrays as leaves."""

Leaf: TypeAlias = Any
"""A leaf of a tree: an array, a Python number, or ``None``."""

KeyPath: TypeAlias = tuple[Any, ...]
"""Where a leaf is in its tree: the keys that ``jax.tree_util.keystr`` formats."""

ExtraArgs: TypeAlias = dict[str, Any]
"""Keyword arguments of optax's extra-args protocol, by name."""

Function: TypeAlias = Callable[..., Any]
"""A function with any signature."""

LossAndAux: TypeAlias = tuple[jax.Array, PyTree]
"""A loss with auxiliary data, as ``jax.value_and_grad(loss_fn, has_aux=True)`` returns it."""
