"""The ascent gradient that transformations in the base optimizer receive."""

import chex
import jax
import jax.numpy as jnp
import optax

from sam_optax._internal import tree_checks
from sam_optax._internal.types import ExtraArgs


def require_ascent_grads(
    who: str, ascent_grads: optax.Updates | None, updates: optax.Updates, extra: ExtraArgs
) -> optax.Updates:
    """The ascent gradient passed by ``sharpness_aware``; raises an error if it is missing."""
    if "training_step" in extra:
        raise ValueError(
            f"{who} is not a perturbation: it belongs in the base optimizer, "
            f"sharpness_aware(optax.chain({who}(...), base), perturbation)."
        )
    if ascent_grads is None:
        raise ValueError(
            f"{who} needs ascent_grads, which sharpness_aware passes to its base optimizer: put it "
            f"there, sharpness_aware(optax.chain({who}(...), base), perturbation), in front of a "
            "wrapper that drops extra arguments (optax.MultiSteps). With alternating, set "
            "keep_ascent_grads=True."
        )
    remedy = "Inside optax.masked and optax.partition, set mask_compatible_extra_args=True."
    tree_checks.require_like("ascent_grads", ascent_grads, updates, remedy)
    return ascent_grads


def where_perturbed(perturbed: chex.Numeric, value: chex.Numeric, otherwise: float) -> jax.Array:
    """A hyperparameter at perturbing steps, and its value at other steps."""
    value = jnp.asarray(value)
    return jnp.where(perturbed, value, jnp.full_like(value, otherwise))
