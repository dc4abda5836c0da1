"""The second pass of a Flax NNX training step."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from sam_optax._internal import checks
from sam_optax._internal.types import Function, Leaf, PyTree
from sam_optax.training._differentiable import require_differentiable

_FILTER = "Let wrt select the trained Variables, as in nnx.Optimizer(model, tx, wrt=nnx.Param)."

_ARGUMENTS = (
    "After model and loss_fn, pass the same arguments as to nnx.value_and_grad(loss_fn)(model, "
    "...): this step's batch, an nnx.Rngs."
)

_FILTERS = (
    *(nnx.All, nnx.Any, nnx.Not, nnx.PathContains, nnx.OfType, nnx.WithTag),
    *(nnx.Everything, nnx.Nothing),
)


def nnx_grad_fn(
    model: Any,
    loss_fn: Function,
    *args: Any,
    wrt: Any = nnx.Param,
    has_aux: bool = False,
    **kwargs: Any,
) -> Callable[[PyTree], PyTree]:
    """Makes the ``grad_fn`` of ``optimizer.update(model, grads, grad_fn=...)`` for Flax NNX.

    It takes the arguments of the first pass: ``nnx_grad_fn(model, loss_fn, x, y, rngs)``
    corresponds to ``nnx.value_and_grad(loss_fn)(model, x, y, rngs)``.

    The gradient function captures the current state of the model and of every module, ``nnx.Rngs``
    and Variable among the arguments, and never changes them. If it is made *before* the first pass,
    it draws from the same RNG streams at the same counts, so both passes use the same dropout
    masks. Only the first pass advances the streams and the BatchNorm statistics, once per step.

    A random start (:func:`sam_optax.rsam`) evaluates its own first gradient and does not use
    ``grads``. The loss and the statistics are still those at the params, for which the step needs a
    third forward pass (under jit the compiler drops the corresponding backward pass).

    Args:
      model: an NNX module.
      loss_fn: ``(model, *args, **kwargs) -> loss``, or ``-> (loss, aux)``.
      *args: the arguments of ``loss_fn`` after the model: this step's batch, an ``nnx.Rngs``,
        further modules. An object that occurs more than once remains one object.
      wrt: filter for the Variables of ``model`` to differentiate, the same as for the optimizer and
        ``nnx.value_and_grad``. Default: ``nnx.Param``.
      has_aux: whether ``loss_fn`` returns ``(loss, aux)``; ``aux`` is dropped.
      **kwargs: keyword arguments of ``loss_fn``.

    Returns:
      ``grad_fn(params) -> grads``, both with the structure of ``nnx.state(model, wrt)`` and arrays
      as leaves.

    Raises:
      TypeError: ``model`` is not an NNX module, or ``wrt`` is passed by position; (from
        ``grad_fn``) ``wrt`` selects a Variable that cannot be differentiated, or ``loss_fn`` takes
        other arguments or does not return a scalar.

    Example:
      >>> import jax.numpy as jnp, optax, sam_optax
      >>> from flax import nnx
      >>> from sam_optax.training import nnx_grad_fn
      >>> class Model(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.hidden = nnx.Linear(3, 8, rngs=rngs)
      ...         self.norm = nnx.BatchNorm(8, rngs=rngs)
      ...         self.dropout = nnx.Dropout(0.1, rngs=rngs)
      ...         self.out = nnx.Linear(8, 1, rngs=rngs)
      ...     def __call__(self, x):
      ...         return self.out(self.dropout(nnx.relu(self.norm(self.hidden(x)))))
      >>> model = Model(nnx.Rngs(0))
      >>> tx = sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.sam(rho=0.05))
      >>> optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
      >>> @nnx.jit
      ... def train_step(model, optimizer, x, y):
      ...     def loss_fn(model, x, y):
      ...         return jnp.mean((model(x) - y) ** 2)
      ...     grad_fn = nnx_grad_fn(model, loss_fn, x, y)  # before the first pass
      ...     loss, grads = nnx.value_and_grad(loss_fn)(model, x, y)
      ...     optimizer.update(model, grads, grad_fn=grad_fn)
      ...     return loss
      >>> loss = train_step(model, optimizer, jnp.ones((4, 3)), jnp.ones((4, 1)))
      >>> int(model.dropout.rngs.count[...])  # drawn from once
      1
    """
    _check_arguments(model, loss_fn, args)
    leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=_is_object)
    # Split all objects at once, so that objects they share are shared in the copies too.
    objects = {i: leaf for i, leaf in enumerate(leaves) if _is_object(leaf)}
    graphdef, params_now, rest = nnx.split(  # type: ignore[misc]
        [model, *objects.values()], _in_model(wrt), ...
    )
    params_structure = jax.tree.structure(params_now)
    # Take the current arrays: a Variable here may belong to the model and change with it.
    rest_leaves, rest_structure = jax.tree.flatten(rest)

    def grad_fn(params: PyTree) -> PyTree:
        require_differentiable(params, _FILTER)

        def loss(params: PyTree) -> PyTree:
            copy, *copies = nnx.merge(
                graphdef,
                jax.tree.unflatten(params_structure, jax.tree.leaves(params)),
                jax.tree.unflatten(rest_structure, rest_leaves),
            )
            own = dict(zip(objects, copies, strict=True))
            now = [own.get(i, leaf) for i, leaf in enumerate(leaves)]
            copied_args, copied_kwargs = jax.tree.unflatten(structure, now)
            called = "loss_fn(model, *args, **kwargs) with the arguments of nnx_grad_fn"
            with checks.explaining_call(called, _ARGUMENTS):
                value = loss_fn(copy, *copied_args, **copied_kwargs)
            return checks.loss_and_aux(value, has_aux)[0]

        return jax.grad(loss)(params)

    return grad_fn


def _is_object(leaf: Leaf) -> bool:
    """Whether an argument is stateful: a module, an ``nnx.Rngs``, a Variable."""
    return isinstance(leaf, nnx.Variable) or nnx.graph.is_graph_node(leaf)


def _in_model(wrt: Any) -> Callable[[Any, Any], bool]:
    """The filter, restricted to the first of several objects."""
    selects = nnx.filterlib.to_predicate(wrt)
    return lambda path, value: path[0] == 0 and selects(path[1:], value)


def _is_filter(argument: Any) -> bool:
    if isinstance(argument, (list, tuple)):
        return len(argument) > 0 and all(_is_filter(part) for part in argument)
    if isinstance(argument, type):
        return issubclass(argument, nnx.Variable)
    return argument is ... or isinstance(argument, _FILTERS)


def _check_arguments(model: Any, loss_fn: Function, args: tuple[Any, ...]) -> None:
    """Raises for arguments that ``nnx.value_and_grad(loss_fn)`` would not take."""
    if not _is_object(model):
        raise TypeError(
            "model must be an NNX module, as in nnx_grad_fn(model, loss_fn, *args), got "
            f"{type(model).__name__}."
        )
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function of the model, got {loss_fn!r}.")
    found = [argument for argument in args if _is_filter(argument)]
    if found:
        raise TypeError(
            "wrt is a keyword argument: nnx_grad_fn(model, loss_fn, *args, wrt=...). The arguments "
            f"after loss_fn are those of the loss, but {found[0]!r} is a filter."
        )
