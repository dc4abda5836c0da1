"""Argument checks of the combinators and their steps, with errors that name the remedy."""

import warnings

import jax
import optax
from optax import OptState, Params, Updates

from sam_optax._combinators.first_pass import FirstPassState
from sam_optax._internal import checks, devices, roles, trees
from sam_optax._internal.hyperparameters import check_transformation
from sam_optax._perturbations.perturbation import Perturbation, as_perturbation


def roles_of(
    base_tx: optax.GradientTransformation,
    perturbation: optax.GradientTransformation,
    descent: optax.GradientTransformation | None,
) -> tuple[Perturbation, roles.Descend]:
    """The arguments of a combinator in their roles; raises for one in another's place."""
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
            "the second argument. A descent transforms gradients, as surrogate_gap() does."
        )
    inner = None if descent is None else roles.open_to_arguments(descent)
    return as_perturbation(perturbation), roles.Descend(inner, roles.open_to_arguments(base_tx))


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


def warn_of_drift(who: str, grads: Updates) -> None:
    """Warns if devices take different gradients, as far as JAX shows it.

    Under ``jax.pmap`` and without ``check_vma`` a ``grad_fn`` that averages itself looks the same.
    """
    found = trees.inexact_leaves(grads)
    axes = [a for a in devices.manual_axes() if not all(devices.is_replicated(g, a) for g in found)]
    if axes:
        names = axes[0] if len(axes) == 1 else tuple(axes)
        sharded = f"norm_axis_name={names!r} if the params are sharded over the axis; or "
        warnings.warn(
            f"{who} is traced under the axis {names!r} of jax.pmap or jax.shard_map without "
            "axis_name: if grad_fn returns each device's own gradient, the params of the "
            "devices drift apart, even if grads are averaged. Pass "
            f"axis_name={names!r}, with grad_fn and grads of each device, not averaged; or "
            f"{sharded if who == 'sharpness_aware' else ''}axis_name=() if grad_fn averages over "
            "the devices itself, or each device trains its own params.",
            UserWarning,
            stacklevel=2,
        )
