"""Argument checks of the combinators and their steps, with errors that name the remedy."""

import jax
import optax
from optax import OptState, Params, Updates

from sam_optax._combinators.first_pass import FirstPassState
from sam_optax._internal import checks, roles
from sam_optax._internal.devices import AxisName
from sam_optax._internal.hyperparameters import check_integer, check_transformation
from sam_optax._internal.types import Function
from sam_optax._perturbations.perturbation import Perturbation, as_perturbation
from sam_optax._schedules.when import GradNormWhen, When, check_when


def roles_of(
    base_tx: optax.GradientTransformation,
    perturbation: optax.GradientTransformation,
    descent: optax.GradientTransformation | None,
) -> tuple[Perturbation, roles.Descend]:
    """The arguments of a combinator in their roles.

    Raises:
      TypeError: an argument is not a gradient transformation, or is a perturbation in the place of
        another role.
    """
    check_transformation("base_tx", base_tx)
    if isinstance(base_tx, Perturbation):
        raise TypeError(
            "base_tx is a Perturbation, such as sam_optax.sam() returns: a base optimizer is an "
            "optax optimizer that descends. Exchange the arguments: the base optimizer comes "
            "first, then the perturbation, as in sharpness_aware(optax.sgd(0.1), sam_optax.sam())."
        )
    if descent is not None:
        check_transformation("descent", descent)
    if isinstance(descent, Perturbation):
        raise TypeError(
            "descent is a Perturbation, such as sam_optax.sam() returns: pass it as perturbation, "
            "the second argument. A descent transforms the sharp gradient, as "
            "sam_optax.surrogate_gap() does."
        )
    inner = None if descent is None else roles.open_to_arguments(descent)
    return as_perturbation(perturbation), roles.Descend(inner, roles.open_to_arguments(base_tx))


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
    if norm_axis_name and method.has_start:
        raise ValueError(
            f"norm_axis_name={norm_axis_name!r} cannot be used with a random start, whose noise is "
            "scaled by the norms of whole kernels. Shard the params under jit instead."
        )
    if sync_perturbation and not axis_name:
        raise ValueError("sync_perturbation=True needs axis_name, the axis to synchronize over.")


def check_params(params: Params | None, name: str = "sharpness_aware") -> None:
    """Raises for params that are missing, or that are not arrays."""
    if params is None:
        raise ValueError(
            f"{name} needs the params: call update(grads, state, params, grad_fn=grad_fn)."
        )
    _refuse_lookahead(name, params)
    checks.require_arrays(params)


def check_copied(params: Params) -> None:
    """Raises for params of which ``alternating`` cannot keep a copy."""
    _refuse_lookahead("alternating", params)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):
        raise TypeError(
            "alternating keeps a copy of the params, but got shapes instead of arrays: for the "
            "state's shapes call jax.eval_shape(tx.init, params)."
        )
    checks.require_arrays(params)


def _refuse_lookahead(name: str, params: Params) -> None:
    if isinstance(params, optax.LookaheadParams):
        raise TypeError(
            f"{name} got optax.LookaheadParams, but the gradient covers the fast params only: "
            "optax.lookahead works neither inside nor around it. Train the fast params, and "
            "update the slow ones in the training loop."
        )


def check_state(state: OptState, expected: type) -> None:
    """Raises for another method's state, and for a state that still holds a first pass."""
    if isinstance(state, FirstPassState):
        raise ValueError(
            "the state still holds the first pass of the last step: take it out with "
            "state, (loss, aux) = sam_optax.pop_first_pass(state)."
        )
    checks.require_state("state", state, expected)


def check_functions(
    method: Perturbation,
    when: When | None,
    updates: Updates | None,
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
