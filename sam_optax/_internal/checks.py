"""Checks of what a caller passes, whose errors name the argument, the cause and the remedy."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import OptState

from sam_optax._internal import trees
from sam_optax._internal.types import Function, KeyPath, Leaf, LossAndAux, PyTree

StateType: TypeAlias = type | tuple[Any, ...]
"""The type of a state, or a tuple of types for a plain tuple of states."""


def require_state(
    name: str, state: OptState, expected: StateType, content: StateType | None = None
) -> None:
    """Raises unless ``state`` has the expected type; ``content`` is shown in the message."""
    if not _is_of(state, expected):
        wanted = _wanted(expected) + (f"({_wanted(content)})" if content else "")
        raise TypeError(
            f"{name} must be {wanted}, as init returns it, got {_found(state)}: it "
            "belongs to another method, or was restored without a target. Restore it into the "
            "state that init returns."
        )


def _is_of(state: OptState, expected: StateType) -> bool:
    if isinstance(expected, tuple):
        return (
            isinstance(state, tuple)
            and len(state) == len(expected)
            and all(map(_is_of, state, expected))
        )
    if expected is optax.EmptyState:
        return isinstance(state, tuple) and len(state) == 0  # () is equivalent
    return isinstance(state, expected)


def _wanted(expected: StateType) -> str:
    if isinstance(expected, tuple):
        return f"({', '.join(map(_wanted, expected))})"
    return expected.__name__


def _found(state: OptState) -> str:
    """The names of the state tuples in a state, such as ``(FullGradientState, EmptyState)``."""
    if not isinstance(state, tuple):
        return type(state).__name__
    name = type(state).__name__ if hasattr(state, "_fields") else ""
    parts = [_found(part) for part in state if isinstance(part, tuple)]
    return f"{name}({', '.join(parts)})" if parts or not name else name


def require_arrays(params: PyTree) -> None:
    """Raises for a tree with leaves that are not arrays, such as the functions of a module."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not hasattr(leaf, "dtype") and not isinstance(leaf, (bool, int, float, complex)):
            raise TypeError(
                f"the params have a leaf that is not an array, {_shown(path, 'the tree itself')}: "
                f"{leaf!r}. Filter the model and pass only the trained arrays: for Equinox "
                "eqx.filter(model, eqx.is_inexact_array) or eqx.partition."
            )
        if isinstance(leaf, np.ndarray) and not leaf.dtype.isnative:
            raise TypeError(
                f"the params have a leaf whose byte order is not this machine's, "
                f"{_shown(path, 'the tree itself')} of dtype {leaf.dtype.str!r}, which JAX does "
                "not support. Convert it: leaf.astype(leaf.dtype.newbyteorder('='))."
            )


def _shown(path: KeyPath, otherwise: str) -> str:
    return jax.tree_util.keystr(path) or otherwise


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
    """Raises unless ``grads`` is a gradient with the structure and shapes of the params.

    Raises:
      TypeError: it is a function, a loss, or what ``jax.value_and_grad`` returns.
      ValueError: its structure or a shape differs.
    """
    one_leaf = jax.tree_util.all_leaves([grads])
    if callable(grads) and one_leaf:
        raise TypeError(
            f"{name} must be a gradient, in the structure of the params, got a function: call it, "
            "as in grads=jax.grad(loss)(params). The function itself is grad_fn."
        )
    if _is_pair(grads) and not _is_pair(params):
        raise TypeError(
            f"{name} must be a gradient, in the structure of the params, got a pair of a value and "
            "a gradient, as jax.value_and_grad returns it: use jax.grad, or pass the second part "
            "of the pair."
        )
    if one_leaf and hasattr(grads, "shape") and grads.shape == () and _size(params) > 1:
        raise TypeError(
            f"{name} must be a gradient, in the structure of the params, got a scalar, as a loss "
            "returns it. Differentiate the loss, grad_fn=jax.grad(loss), or pass the loss itself "
            "as value_fn=loss."
        )
    remedy = "Differentiate with jax.grad, with respect to the params alone."
    require_like(name, grads, params, remedy)
    jax.tree_util.tree_map_with_path(
        lambda path, p, g: _require_shape(name, path, p, g), params, grads, is_leaf=trees.is_none
    )


def _size(tree: PyTree) -> int:
    return sum(int(np.prod(np.shape(leaf))) for leaf in jax.tree.leaves(tree))


def _require_shape(name: str, path: KeyPath, p: Leaf, g: Leaf) -> None:
    if not (hasattr(g, "shape") and hasattr(p, "shape")) or g.shape == p.shape:
        return
    remedy = "Differentiate at the params that the function receives."
    if g.shape[1:] == p.shape:
        remedy = (
            "If the first axis is that of the examples, return their mean. (For differential "
            "privacy clip each example's gradient and add the noise inside the gradient function, "
            "not in the base optimizer: both gradients of a step read the data.)"
        )
    raise ValueError(
        f"{name} must have the shapes of the params, got {g.shape} for the leaf "
        f"{_shown(path, 'of the params')} of shape {p.shape}. {remedy}"
    )


@contextlib.contextmanager
def explaining_call(called: str, remedy: str) -> Iterator[None]:
    """Adds to a ``TypeError`` how the caller's function is called, and what it must be."""
    try:
        yield
    except TypeError as error:
        error.add_note(f"It was called as {called}. {remedy}")
        raise


def checked_gradient(grad_fn: Function, params: PyTree, name: str = "grad_fn") -> Function:
    """``grad_fn`` with clear errors if it takes other arguments or returns no gradient."""
    remedy = (
        f"{name} must be a function of the params alone, on this step's batch, such as "
        "jax.grad(lambda params: loss(params, batch))."
    )
    if not callable(grad_fn):
        found = type(grad_fn).__name__
        raise TypeError(f"{remedy} Got a {found}; a gradient itself is passed as grads.")

    def checked(point: PyTree, *group: chex.Numeric) -> PyTree:
        with explaining_call(_written(name, group), remedy):
            grads = grad_fn(point, *group)
        require_gradient(f"the result of {name}", grads, params)
        return grads

    return checked


def checked_loss(loss_fn: Function, has_aux: bool, remedy: str) -> Callable[..., LossAndAux]:
    """``loss_fn`` as a function that returns ``(loss, aux or None)``, with clear errors."""

    def checked(params: PyTree, *group: chex.Numeric) -> LossAndAux:
        with explaining_call(_written("loss_fn", group), remedy):
            value = loss_fn(params, *group)
        return loss_and_aux(value, has_aux)

    return checked


def loss_and_aux(value: PyTree, has_aux: bool) -> LossAndAux:
    """The result of a loss function, as a pair.

    Raises:
      TypeError: the loss is not a scalar, or the result is not a pair although ``has_aux`` is set.
    """
    if has_aux:
        if not _is_pair(value):
            raise TypeError(
                "with has_aux=True loss_fn must return a pair (loss, aux), got "
                f"{_described(value)}: leave has_aux out if there is no aux."
            )
        loss, aux = value
    else:
        loss, aux = value, None
        if _is_pair(value):
            raise TypeError(
                "loss_fn must return a scalar, got a pair: pass has_aux=True if it is (loss, aux). "
                "If it is from jax.value_and_grad, pass the loss, which is differentiated here."
            )
    if not (jax.tree_util.all_leaves([loss]) and jnp.shape(loss) == ()):
        raise TypeError(
            f"loss_fn must return a scalar, got {_described(loss)}: take the mean over the batch, "
            "and pass the loss itself, not its gradient."
        )
    return loss, aux


def _is_pair(tree: PyTree) -> bool:
    return type(tree) in (tuple, list) and len(tree) == 2


def _written(name: str, group: tuple[chex.Numeric, ...]) -> str:
    return f"{name}(params, i)" if group else f"{name}(params)"


def _described(value: PyTree) -> str:
    if jax.tree_util.all_leaves([value]) and hasattr(value, "shape"):
        return f"an array of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
