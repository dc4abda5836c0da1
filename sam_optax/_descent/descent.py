"""The role of a descent: a transformation of the sharp gradient that receives both gradients."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from chex import Numeric
from optax import OptState, Params, Updates

from sam_optax._internal import checks
from sam_optax._internal import hyperparameters as hp
from sam_optax._internal.devices import AxisName
from sam_optax._internal.types import ExtraArgs, Function

T = TypeVar("T")


def descent(
    init: optax.TransformInitFn, update: Function, **hyperparameters: hp.Hyperparameter
) -> optax.GradientTransformationExtraArgs:
    """A descent whose ``update`` receives the hyperparameters as numbers."""
    method = hp.scheduled(hyperparameters, init, update, update)
    return optax.GradientTransformationExtraArgs(method.init, method.update)


def of_both_gradients(
    who: str, combine: Function, **hyperparameters: hp.Hyperparameter
) -> optax.GradientTransformationExtraArgs:
    """The descent ``combine(g_s, g, perturbed, norm_axis_name, **hyperparameters)``."""

    def update_fn(
        updates: Updates,
        state: OptState,
        params: Params | None = None,
        *,
        ascent_grads: Updates | None = None,
        perturbed: Numeric = True,
        norm_axis_name: AxisName | None = None,
        **extra: Any,
    ) -> tuple[Updates, OptState]:
        g = require_ascent_grads(who, ascent_grads, updates, extra)
        numbers = {name: extra[name] for name in hyperparameters}
        return combine(updates, g, perturbed, norm_axis_name, **numbers), state

    return descent(hp.stateless, update_fn, **hyperparameters)


def require(who: str, name: str, value: T | None, extra: ExtraArgs) -> T:
    """An argument that a descent receives; raises an error if it is missing.

    It is if the transformation is used as a perturbation, inside the base optimizer, or behind a
    wrapper that drops extra arguments.
    """
    if "draw_index" in extra:  # what only perturbations receive
        raise ValueError(
            f"{who} is not a perturbation: pass it as descent=, sharpness_aware(base_tx, "
            f"perturbation, descent={who}(...))."
        )
    if value is None:
        raise ValueError(
            f"{who} needs {name}, which sharpness_aware and alternating pass to their descent, and "
            f"not to base_tx: pass it as descent=, sharpness_aware(base_tx, perturbation, "
            f"descent={who}(...)), in no wrapper that drops extra arguments (optax.MultiSteps)."
        )
    return value


def require_ascent_grads(
    who: str, ascent_grads: Updates | None, updates: Updates, extra: ExtraArgs
) -> Updates:
    """The ascent gradient, matching the sharp one."""
    found = require(who, "ascent_grads", ascent_grads, extra)
    remedy = "Inside optax.masked and optax.partition, set mask_compatible_extra_args=True."
    checks.require_like("ascent_grads", found, updates, remedy)
    return found


def where_perturbed(perturbed: Numeric, value: Numeric, otherwise: float) -> jax.Array:
    """A hyperparameter at perturbing steps, and its value at other steps."""
    value = jnp.asarray(value)
    return jnp.where(perturbed, value, jnp.full_like(value, otherwise))
