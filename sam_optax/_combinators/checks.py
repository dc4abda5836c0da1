"""Argument checks of the combinators and their steps, with errors that name the remedy."""

import jax
import optax

from sam_optax._combinators.first_pass import FirstPassState
from sam_optax._internal import slips, states, tree_checks
from sam_optax._internal.devices import AxisName
from sam_optax._internal.hyperparameters import check_integer
from sam_optax._internal.types import Function
from sam_optax._perturbations.perturbation import Perturbation
from sam_optax._schedules.when import GradNormWhen, When, check_when


def check_options(
    method: Perturbation,
    *,
    ascent_steps: int,
    when: When | None,
    axis_name: AxisName | None,
    sync_perturbation: bool,
    norm_axis_name: AxisName | None,
    groups: int | None,
) -> None:
    """Raises for options of ``sharpness_aware`` that are out of range or exclude each other."""
    check_integer("ascent_steps", ascent_steps, lower=1)
    if method.single_pass and ascent_steps > 1:
        raise ValueError(
            f"ascent_steps must be 1 for a perturbation that takes its only gradient at its start "
            f"(momentum_start, low_pass), got {ascent_steps!r}."
        )
    check_when(when)
    if isinstance(when, GradNormWhen) and (method.has_start or groups is not None):
        raise ValueError(
            "when sees the norm of the gradient at the params (above_average), which a step with "
            "groups or with a perturbation that has a start (random_start, rsam, low_pass, "
            "momentum_start) does not evaluate: use every, after or bernoulli."
        )
    if groups is not None:
        check_integer("groups", groups, lower=1)
    if norm_axis_name is not None and method.has_start:
        raise ValueError(
            f"norm_axis_name={norm_axis_name!r} cannot be used with a random start, whose noise is "
            "scaled by the norms of whole kernels. Shard the params under jit instead."
        )
    if sync_perturbation and axis_name is None:
        raise ValueError("sync_perturbation=True needs axis_name, the axis to synchronize over.")


def check_params(params: optax.Params) -> None:
    """Raises for params that are incomplete or that do not belong to the model."""
    _refuse_lookahead("sharpness_aware", params)
    tree_checks.require_arrays(params)


def check_copied(params: optax.Params) -> None:
    """Raises for params of which ``alternating`` cannot keep a copy."""
    _refuse_lookahead("alternating", params)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):
        raise TypeError(
            "alternating keeps a copy of the params, but got shapes instead of arrays: for the "
            "state's shapes call jax.eval_shape(tx.init, params)."
        )
    tree_checks.require_arrays(params)


def _refuse_lookahead(name: str, params: optax.Params) -> None:
    if isinstance(params, optax.LookaheadParams):
        raise TypeError(
            f"{name} got optax.LookaheadParams, but the gradient covers the fast params only: "
            "optax.lookahead works neither inside nor around it. Train the fast params, and "
            "update the slow ones in the training loop."
        )


def check_grads(grads: optax.Updates, params: optax.Params) -> None:
    """Raises unless ``grads`` is a gradient with the structure of the params."""
    slips.check_gradient("grads", grads, params)
    tree_checks.require_gradient("grads", grads, params)


def check_state(state: optax.OptState, expected: type) -> None:
    """Raises for another method's state, and for a state that still holds a first pass."""
    if isinstance(state, FirstPassState):
        raise ValueError(
            "the state still holds the first pass of the last step: take it out with "
            "state, (loss, aux) = sam_optax.pop_first_pass(state)."
        )
    states.require("state", state, expected)


def check_functions(
    method: Perturbation,
    when: When | None,
    updates: optax.Updates | None,
    value_and_grad_fn: Function | None,
    ascent_grad_fn: Function | None,
) -> None:
    """Raises for gradient functions that do not match the perturbation or the given gradient."""
    if value_and_grad_fn is not None and updates is not None and not method.has_start:
        raise ValueError(
            "value_and_grad_fn requires grads=None: if you have the gradient at the params, you "
            "have the loss too. Pass grads and grad_fn."
        )
    if ascent_grad_fn is not None and isinstance(when, GradNormWhen):
        raise ValueError(
            "ascent_grad_fn is for perturbing steps only, and when sees the norm of the gradient "
            "at the params (above_average): leave one of them out."
        )
    if ascent_grad_fn is not None and method.single_pass:
        raise ValueError(
            "ascent_grad_fn cannot be used with a perturbation that takes its only gradient at its "
            "start (momentum_start, low_pass): leave it out."
        )
