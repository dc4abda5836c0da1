"""What a pass of a step returns: the gradient and, on request, the loss and auxiliary output."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from sam_optax._internal import control_flow, trees

# With groups, both take the index of the group as a second argument.
GradFn = Callable[..., optax.Updates]
# What jax.value_and_grad(loss_fn, has_aux=True) returns.
ValueAndGradFn = Callable[..., tuple[tuple[Any, Any], optax.Updates]]
# (loss, aux), or None if they are not asked for, and the gradient.
FirstPass = tuple[tuple[Any, Any] | None, optax.Updates]
Evaluation = Callable[..., FirstPass]


class FirstPassState(NamedTuple):
    """What ``update(..., value_and_grad_fn=...)`` returns as state; see :func:`pop_first_pass`.

    It is no state to keep: :func:`sharpness_aware`'s own, of the structure that ``init`` gives,
    is in it.

    Attributes:
      state: :class:`~sam_optax.SharpnessAwareState`.
      value: ``(loss, aux)`` of the first pass.
    """

    state: Any
    value: tuple[Any, Any]


def pop_first_pass(opt_state: optax.OptState) -> tuple[optax.OptState, tuple[Any, Any]]:
    """Takes the loss and the auxiliary output of the first pass out of the new state.

    Args:
      opt_state: what ``update(..., value_and_grad_fn=...)`` returned, also from inside
        ``optax.chain`` and other wrappers.

    Returns:
      ``(opt_state, (loss, aux))``, the state with the structure that ``init`` gave it.

    Raises:
      ValueError: the state does not hold exactly one first pass.

    Example:
      >>> import jax, jax.numpy as jnp, optax, sam_optax
      >>> tx = sam_optax.sharpness_aware(
      ...     optax.sgd(0.1), sam_optax.rsam(rho=0.1, key=jax.random.key(0)))
      >>> params = jnp.array([3.0, 4.0])
      >>> state = tx.init(params)
      >>> def loss_fn(w):
      ...     return 0.5 * jnp.sum(w**2), {"largest": jnp.max(w)}
      >>> updates, state = tx.update(
      ...     None, state, params, value_and_grad_fn=jax.value_and_grad(loss_fn, has_aux=True))
      >>> state, (loss, aux) = sam_optax.pop_first_pass(state)
      >>> bool(loss != 12.5)  # the first pass of R-SAM is at its random start
      True
    """

    def is_first_pass(node: Any) -> bool:
        return isinstance(node, FirstPassState)

    nodes, structure = jax.tree.flatten(opt_state, is_leaf=is_first_pass)
    found = [node for node in nodes if is_first_pass(node)]
    if len(found) != 1:
        raise ValueError(
            "the optimizer state must hold exactly one first pass: call pop_first_pass once, on "
            "the state that update(..., value_and_grad_fn=...) of one sharpness_aware returned. "
            f"Found {len(found)}."
        )
    nodes = [node.state if is_first_pass(node) else node for node in nodes]
    return jax.tree.unflatten(structure, nodes), found[0].value


def evaluation(grad_fn: GradFn | None, value_and_grad_fn: ValueAndGradFn | None) -> Evaluation:
    """Whichever of the two functions was given, in the form of the second.

    Raises:
      ValueError: both or none were given.
    """
    if grad_fn is not None and value_and_grad_fn is not None:
        raise ValueError("pass grad_fn or value_and_grad_fn, not both.")
    if callable(value_and_grad_fn):
        return _checked(value_and_grad_fn)
    if not callable(grad_fn):
        raise ValueError(
            "sharpness_aware needs a gradient function: call update(grads, state, params, "
            "grad_fn=grad_fn), where grad_fn(params) returns the gradient on this step's batch, "
            "such as jax.grad(lambda p: loss(p, batch)). A training loop that cannot pass grad_fn "
            "on can use sam_optax.alternating, and Flax's TrainState has a counterpart in "
            f"sam_optax.training. Got grad_fn={grad_fn!r}."
        )
    return lambda params, *group: (None, grad_fn(params, *group))


def _checked(value_and_grad_fn: ValueAndGradFn) -> Evaluation:
    """The function, whose aux is such that groups can be averaged over."""

    def evaluate(params: optax.Params, *group: Any) -> FirstPass:
        (loss, aux), grads = value_and_grad_fn(params, *group)
        for path, leaf in jax.tree_util.tree_leaves_with_path(aux) if group else []:
            if not trees.is_inexact(leaf):
                raise TypeError(
                    "aux must be of floating-point numbers with groups, since it is averaged over "
                    f"them; the leaf {jax.tree_util.keystr(path) or 'aux'} is "
                    f"{getattr(leaf, 'dtype', type(leaf).__name__)}. Return a mean over the "
                    "group's examples in place of a count, and leave other leaves out."
                )
        return (loss, aux), grads

    return evaluate


def ascent_evaluation(ascent_grad_fn: GradFn | None, single_pass: bool) -> Evaluation | None:
    """The function that leads the ascent, if there is one of its own.

    Raises:
      ValueError: there is no ascent to lead.
    """
    if ascent_grad_fn is None:
        return None
    if not callable(ascent_grad_fn):
        raise TypeError(
            "ascent_grad_fn must be a function of the params that returns a gradient, got "
            f"{ascent_grad_fn!r}."
        )
    if single_pass:
        raise ValueError(
            "ascent_grad_fn does not go with a perturbation that takes its only gradient at its "
            "start (momentum_start, low_pass): leave it out."
        )

    def evaluate(params: optax.Params, *group: Any) -> FirstPass:
        grads = ascent_grad_fn(params, *group)
        remedy = "Use jax.grad, and not jax.value_and_grad."
        trees.require_like("what ascent_grad_fn returns", grads, params, remedy)
        return None, grads

    return evaluate


def check_value_and_grad(updates: optax.Updates | None, has_start: bool) -> None:
    """Raises where ``value_and_grad_fn`` would not make the first pass."""
    if updates is not None and not has_start:
        raise ValueError(
            "value_and_grad_fn is for grads=None: where the gradient at the params is given, its "
            "caller has the loss too. Pass grads and grad_fn."
        )


def trace_once(evaluate: Evaluation, params: optax.Params) -> Evaluation:
    """``evaluate`` for several evaluations in one step, traced once.

    Under jit an inner jit shares the trace and is inlined by the compiler. Outside of it, it
    would compile a fresh function at every step.
    """
    return jax.jit(evaluate) if control_flow.is_traced(params) else evaluate
