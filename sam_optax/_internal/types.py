"""Type aliases for what Python's types cannot express: pytrees, and whatever a caller passes."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax

PyTree: TypeAlias = Any  # with arrays as leaves
Leaf: TypeAlias = Any  # of a tree: an array, a Python number, or None
KeyPath: TypeAlias = tuple[Any, ...]  # to a leaf of a tree, as jax.tree_util.keystr formats it
ExtraArgs: TypeAlias = dict[str, Any]  # keyword arguments of optax's extra-args protocol
Function: TypeAlias = Callable[..., Any]  # with any signature
LossAndAux: TypeAlias = tuple[jax.Array, PyTree]  # of jax.value_and_grad(loss_fn, has_aux=True)
