"""Errors for common mistakes: a function with other arguments, a pair in place of a gradient."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp

from sam_optax._internal.types import Function, LossAndAux, PyTree

_VALUE_AND_GRAD = (
    "a pair of a value and a gradient, as jax.value_and_grad returns it: use jax.grad, or pass the "
    "second part of the pair."
)


def call(
    name: str,
    function: Function,
    *args: Any,
    called: str,
    remedy: str,
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Calls ``function(*args, **kwargs)``; an error explains which arguments it must take.

    The signature is inspected only if the call fails, as a decorator may show another one.

    Args:
      name: the name of the argument that holds the function.
      function: the function to call.
      *args: its positional arguments.
      called: the call as shown in the message.
      remedy: what to pass instead, for the message.
      kwargs: keyword arguments.

    Raises:
      TypeError: the signature of the function does not allow the call.
    """
    kwargs = kwargs or {}
    try:
        return function(*args, **kwargs)
    except TypeError as error:
        reason = _refusal(function, args, kwargs)
        if reason is None:
            raise
        raise TypeError(f"{name} is called as {called}, which fails: {reason}. {remedy}") from error


def _refusal(function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """The reason why a signature does not allow a call, or ``None``."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    except ValueError:  # a function without a signature
        pass
    return None


def check_gradient(name: str, grads: PyTree, params: PyTree) -> None:
    """Raises for a pair in place of a gradient, and for a function.

    Raises:
      TypeError: ``grads`` is what ``jax.value_and_grad`` returns, or a function.
    """
    if callable(grads) and jax.tree_util.all_leaves([grads]):
        raise TypeError(
            f"{name} must be a gradient, in the structure of the params, got a function: call it, "
            "as in grads=jax.grad(loss)(params). The function itself is grad_fn."
        )
    if _is_pair(grads) and not _is_pair(params):
        raise TypeError(
            f"{name} must be a gradient, in the structure of the params, got {_VALUE_AND_GRAD}"
        )


def checked_gradient(grad_fn: Function, params: PyTree, name: str = "grad_fn") -> Function:
    """``grad_fn`` with clear errors if it takes other arguments or returns a pair."""

    def checked(point: PyTree, *group: chex.Numeric) -> PyTree:
        remedy = (
            "It must be a function of the params alone, on this step's batch, such as "
            "jax.grad(lambda params: loss(params, batch))."
        )
        called = _written(name, group)
        grads = call(name, grad_fn, point, *group, called=called, remedy=remedy)
        check_gradient(f"what {name} returns", grads, params)
        return grads

    return checked


def checked_loss(loss_fn: Function, has_aux: bool, remedy: str) -> Callable[..., LossAndAux]:
    """``loss_fn`` as a function that returns ``(loss, aux or None)``, with clear errors."""

    def checked(params: PyTree, *group: chex.Numeric) -> LossAndAux:
        called = _written("loss_fn", group)
        value = call("loss_fn", loss_fn, params, *group, called=called, remedy=remedy)
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
