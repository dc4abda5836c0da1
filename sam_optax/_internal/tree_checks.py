"""Checks of the caller's trees: whether they are params, and whether they match the params."""

import jax
import numpy as np

from sam_optax._internal import trees
from sam_optax._internal.types import KeyPath, Leaf, PyTree


def require_arrays(params: PyTree) -> None:
    """Raises for a tree with leaves that are not arrays, such as the functions of a module."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not hasattr(leaf, "dtype") and not isinstance(leaf, (bool, int, float, complex)):
            name = jax.tree_util.keystr(path)
            raise TypeError(
                f"the params have a leaf that is not an array, {name or 'the tree itself'}: "
                f"{leaf!r}. Filter the model and pass only the trained arrays: for Equinox "
                "eqx.filter(model, eqx.is_inexact_array) or eqx.partition."
            )
        if isinstance(leaf, np.ndarray) and not leaf.dtype.isnative:
            name = jax.tree_util.keystr(path)
            raise TypeError(
                f"the params have a leaf whose byte order is not this machine's, "
                f"{name or 'the tree itself'} of dtype {leaf.dtype.str!r}, which JAX does not "
                "support. Convert it: leaf.astype(leaf.dtype.newbyteorder('='))."
            )


def require_like(name: str, tree: PyTree, like: PyTree, remedy: str) -> None:
    """Raises unless a tree matches another leaf by leaf; ``None`` matches anything."""

    def lines_up(a: PyTree, b: PyTree) -> bool:
        return a is None or b is None or jax.tree_util.all_leaves([b])

    try:
        same = jax.tree.map(lines_up, like, tree, is_leaf=trees.is_none)
    except (TypeError, ValueError):
        same = False
    if not all(jax.tree.leaves(same)):
        raise ValueError(
            f"{name} must have the structure of the gradient, {jax.tree.structure(like)}, got "
            f"{jax.tree.structure(tree)}. {remedy}"
        )


def require_gradient(name: str, grads: PyTree, params: PyTree) -> None:
    """Raises unless a gradient matches the params in structure and shapes."""
    require_like(
        name,
        grads,
        params,
        "Differentiate with jax.grad, and not with jax.value_and_grad, whose result is a pair.",
    )

    def require_shape(path: KeyPath, p: Leaf, g: Leaf) -> None:
        if hasattr(g, "shape") and hasattr(p, "shape") and g.shape != p.shape:
            raise ValueError(
                f"{name} must have the shapes of the params, got {g.shape} for the leaf "
                f"{jax.tree_util.keystr(path) or 'of the params'} of shape {p.shape}. Average the "
                "gradients of single examples first."
            )

    jax.tree_util.tree_map_with_path(require_shape, params, grads, is_leaf=trees.is_none)
