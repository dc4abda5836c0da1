"""Flax's overwrite-with-gradient collections: in the params, but not seen by the optimizer."""

from collections.abc import Mapping

from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from sam_optax._internal.types import Function, PyTree


def has_overwritten(tree: PyTree) -> bool:
    """Whether params or a gradient contain such a collection."""
    return isinstance(tree, Mapping) and OVERWRITE_WITH_GRADIENT in tree


def optimized(tree: PyTree) -> PyTree:
    """The part of params or of a gradient that the optimizer sees."""
    return tree["params"] if has_overwritten(tree) else tree


def with_optimized(tree: PyTree, params: PyTree) -> PyTree:
    """``tree`` with ``params`` as the optimizer's part."""
    if not has_overwritten(tree):
        return params
    return {"params": params, OVERWRITE_WITH_GRADIENT: tree[OVERWRITE_WITH_GRADIENT]}


def of_optimized(grad_fn: Function, tree: PyTree) -> Function:
    """``grad_fn`` as a function of only the optimizer's part of the params ``tree``."""
    if not has_overwritten(tree):
        return grad_fn
    return lambda params, *args: optimized(grad_fn(with_optimized(tree, params), *args))
