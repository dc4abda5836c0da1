"""Watching a run: scalars of the last step, kept in the state on request."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from sam_optax._internal import trees, vectors
from sam_optax._internal.devices import AxisName


class StepInfo(NamedTuple):
    """The last step in numbers: ``state.info`` of ``sharpness_aware(..., info=True)``.

    All are float32 scalars (float64 with such params). Under ``axis_name`` and with ``groups`` the
    gradients are the averaged ones, and the other numbers are means.

    Attributes:
      ascent_norm: ‖g‖, of the first ascent gradient.
      sharp_norm: ‖g_s‖, of the gradient that drove the base optimizer.
      eps_norm: ‖ε‖, the distance of the perturbed params; 0 in a step that did not perturb.
      cosine: ⟨g, g_s⟩/(‖g‖ ‖g_s‖); 1 in a step that did not perturb, 0 where a gradient is 0.
      loss_rise: L(w + ε) − L(w) on the step's batch, in the loss's units, where a step with
        ``value_and_grad_fn`` evaluates both; else NaN.
    """

    ascent_norm: chex.Array
    sharp_norm: chex.Array
    eps_norm: chex.Array
    cosine: chex.Array
    loss_rise: chex.Array


class Climb(NamedTuple):
    """What only the passes of a step know: see :class:`StepInfo`."""

    eps_norm: chex.Array
    loss_rise: chex.Array


def dtype_of(params: optax.Params) -> Any:
    """The dtype of all numbers."""
    return vectors.accumulator_dtype([trees.widen(x) for x in trees.inexact_leaves(params)])


def initial(params: optax.Params) -> StepInfo:
    """Before the first step nothing is known."""
    unknown = jnp.full((), jnp.nan, dtype_of(params))
    return StepInfo(*(jnp.copy(unknown) for _ in StepInfo._fields))


def no_climb(params: optax.Params) -> Climb:
    """A step that does not perturb."""
    zero = jnp.zeros((), dtype_of(params))
    return Climb(zero, zero)


def climb(
    params: optax.Params,
    point: optax.Params,
    values: tuple[Any, Any],
    axis_name: AxisName | None,
) -> Climb:
    """A step that perturbs: from the params to the point, with both losses or ``None``."""
    dtype = dtype_of(params)

    def difference(p: Any, q: Any) -> jax.Array:
        q = trees.widen(q)
        return q - jnp.asarray(p).astype(q.dtype)

    distance = vectors.norm(trees.map_inexact(difference, params, point), axis_name)
    before, after = values
    rise = jnp.nan if before is None or after is None else after - before
    return Climb(distance.astype(dtype), jnp.asarray(rise).astype(dtype))


def collect(
    ascent_grads: optax.Updates, grads: optax.Updates, climbed: Climb, axis_name: AxisName | None
) -> StepInfo:
    """The step in numbers."""
    dtype = climbed.eps_norm.dtype
    ascent_norm = vectors.norm(ascent_grads, axis_name).astype(dtype)
    sharp_norm = vectors.norm(grads, axis_name).astype(dtype)
    share = vectors.coefficient(ascent_grads, grads, axis_name).astype(dtype)
    # ⟨g, g_s⟩/‖g_s‖² times ‖g_s‖/‖g‖.
    safe = jnp.where(ascent_norm > 0, ascent_norm, 1)
    cosine = jnp.where(ascent_norm > 0, share * (sharp_norm / safe), 0)
    return StepInfo(ascent_norm, sharp_norm, climbed.eps_norm, cosine, climbed.loss_rise)
