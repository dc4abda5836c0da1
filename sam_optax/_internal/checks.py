"""Checks of what a caller passes, whose errors name the argument, the cause and the remedy."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from chex import Numeric
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
            f"{name} must be {wanted}, as init returns it, got {_found(state)}: it belongs "
            "to another method, or was restored without a target, such as one that init returns."
        )


def _is_of(state: OptState, expected: StateType) -> bool:
    if expected is optax.EmptyState:
        expected = ()  # is equivalent
    if not isinstance(expected, tuple):
        return isinstance(state, expected)
    same = isinstance(state, tuple) and len(state) == len(expected)
    return same and all(map(_is_of, state, expected))


def _wanted(expected: StateType) -> str:
    if isinstance(expected, tuple):
        return f"({', '.join(map(_wanted, expected))})"
    return expected.__name__


def _found(state: OptState) -> str:
    """The names of the states in it, such as ``(FullGradientState, EmptyState)``."""
    if not isinstance(state, tuple):
        return type(state).__name__
    name = type(state).__name__ if hasattr(state, "_fields") else ""
    parts = [_found(part) for part in state if isinstance(part, tuple)]
    return f"{name}({', '.join(parts)})" if parts or not name else name


def require_arrays(params: PyTree) -> None:
    """Raises for a tree with leaves that are not arrays, such as the functions of a module."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        where = jax.tree_util.keystr(path) or "the tree itself"
        if not hasattr(leaf, "dtype") and not isinstance(leaf, (bool, int, float, complex)):
            raise TypeError(
                f"the params have a leaf that is not an array, {where}: {leaf!r}. Filter the "
                "model and pass only the trained arrays: for Equinox "
                "eqx.filter(model, eqx.is_inexact_array) or eqx.partition."
            )
        if isinstance(leaf, np.ndarray) and not leaf.dtype.isnative:
            raise TypeError(
                f"the params have a leaf whose byte order is not this machine's, {where} of dtype "
                f"{leaf.dtype.str!r}, which JAX does not support. Convert it: "
                "leaf.astype(leaf.dtype.newbyteorder('='))."
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
    """Raises unless ``grads`` is a gradient with the structure and shapes of the params."""
    one_leaf = jax.tree_util.all_leaves([grads])
    scalar = one_leaf and getattr(grads, "shape", None) == ()
    found = None
    if callable(grads) and one_leaf:
        found = "a function: call it, grads=jax.grad(loss)(params). The function itself is grad_fn."
    elif _is_pair(grads) and not _is_pair(params):
        found = (
            "a pair of a value and a gradient, as jax.value_and_grad returns it: use jax.grad, or "
            "pass the second part of the pair."
        )
    elif scalar and sum(map(np.size, jax.tree.leaves(params))) > 1:
        found = (
            "a scalar, as a loss returns it. Differentiate the loss, grad_fn=jax.grad(loss), or "
            "pass the loss itself as value_fn=loss."
        )
    if found:
        raise TypeError(f"{name} must be a gradient, in the structure of the params, got {found}")
    remedy = "Differentiate with jax.grad, and not with jax.value_and_grad, whose result is a pair."
    require_like(name, grads, params, remedy)
    require_shape = functools.partial(_require_shape, name)
    jax.tree_util.tree_map_with_path(require_shape, params, grads, is_leaf=trees.is_none)


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
        f"{jax.tree_util.keystr(path) or 'of the params'} of shape {p.shape}. {remedy}"
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

    def checked(point: PyTree, *group: Numeric) -> PyTree:
        grads = _called(name, grad_fn, remedy, point, *group)
        require_gradient(f"the result of {name}", grads, params)
        return grads

    return checked


def checked_loss(loss_fn: Function, has_aux: bool, remedy: str) -> Callable[..., LossAndAux]:
    """``loss_fn`` as a function that returns ``(loss, aux or None)``, with clear errors."""

    def checked(params: PyTree, *group: Numeric) -> LossAndAux:
        return loss_and_aux(_called("loss_fn", loss_fn, remedy, params, *group), has_aux)

    return checked


def loss_and_aux(value: PyTree, has_aux: bool) -> LossAndAux:
    """The result of a loss function, as a pair; raises unless the loss is a scalar."""
    if has_aux and not _is_pair(value):
        raise TypeError(
            f"with has_aux=True loss_fn must return a pair (loss, aux), got {_described(value)}: "
            "leave has_aux out if there is no aux."
        )
    if not has_aux and _is_pair(value):
        raise TypeError(
            "loss_fn must return a scalar, got a pair: pass has_aux=True if it is (loss, aux). "
            "If it is from jax.value_and_grad, pass the loss, which is differentiated here."
        )
    loss, aux = value if has_aux else (value, None)
    if not (jax.tree_util.all_leaves([loss]) and jnp.shape(loss) == ()):
        raise TypeError(
            f"loss_fn must return a scalar, got {_described(loss)}: take the mean over the batch, "
            "and pass the loss itself, not its gradient."
        )
    return loss, aux


def _is_pair(tree: PyTree) -> bool:
    return type(tree) in (tuple, list) and len(tree) == 2


def _called(name: str, f: Function, remedy: str, params: PyTree, *group: Numeric) -> PyTree:
    with explaining_call(f"{name}(params, i)" if group else f"{name}(params)", remedy):
        return f(params, *group)


def _described(value: PyTree) -> str:
    if jax.tree_util.all_leaves([value]) and hasattr(value, "shape"):
        return f"an array of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
