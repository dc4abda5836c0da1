"""Perturbations without state, for gradient functions and losses, which cannot keep one."""

import contextlib

import jax
import jax.numpy as jnp
import optax
from optax import OptState, Params, Updates

from sam_optax._internal import hyperparameters as hp
from sam_optax._internal import roles
from sam_optax._internal.start_state import refuse_lost_start


def require_stateless(perturbation: optax.GradientTransformation, alternative: str) -> None:
    """Raises for a perturbation with a start or a state, as far as it shows without the params."""
    hp.check_transformation("perturbation", perturbation)
    if getattr(perturbation, "has_start", False):
        raise ValueError(_message("a start", alternative))
    state: OptState = ()
    with contextlib.suppress(Exception):  # an init may need the structure of the params
        state = jax.eval_shape(perturbation.init, jax.ShapeDtypeStruct((), jnp.float32))
    _require_empty(state, alternative)


def _require_empty(state: OptState, alternative: str) -> None:
    refuse_lost_start(state)
    held = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(state)]
    if held:
        raise ValueError(_message(f"a state, which holds {held[0] or 'an array'}", alternative))


def _message(found: str, alternative: str) -> str:
    return (
        "perturbation must have neither a start nor a state (schedules, averages, random masks, "
        f"inject_hyperparams), but has {found}: {alternative}"
    )


def displacement(
    perturbation: optax.GradientTransformation, grads: Updates, params: Params, alternative: str
) -> Updates:
    """ε at the params, from their gradient."""
    state = perturbation.init(params)
    _require_empty(state, alternative)
    arguments = roles.of_perturbation(grads, {})
    return roles.open_to_arguments(perturbation).update(grads, state, params, **arguments)[0]
