"""Diagnostics of a run: scalars of the last step, kept in the state on request."""

from typing import NamedTuple, TypeAlias

import chex
import jax
import jax.numpy as jnp
from optax import Params, Updates

from sam_optax._internal import trees, vectors
from sam_optax._internal.devices import AxisName
from sam_optax._internal.types import Leaf


class StepInfo(NamedTuple):
    """Diagnostics of the last step: ``state.info`` of ``sharpness_aware(..., info=True)``.

    All fields are float32 scalars (float64 for float64 params), 0 before the first step. Under
    ``axis_name`` and with ``groups``, the gradients are averaged and the other numbers are means.

    Attributes:
      ascent_norm: ‖g‖, the norm of the first ascent gradient.
      sharp_norm: ‖g_s‖, the norm of the gradient that drove the base optimizer.
      eps_norm: ‖ε‖, the distance of the perturbed params; 0 in a step that did not perturb.
      cosine: ⟨g, g_s⟩/(‖g‖ ‖g_s‖); 1 in a step that did not perturb, 0 where a gradient is 0.
      start_share: ⟨δ₀, ε⟩/(‖δ₀‖ ‖ε‖), the cosine between ε and the displacement δ₀ of the start:
        near 1, ε is mostly noise. 0 for a perturbation without a start.
      loss_rise: L(w + ε) − L(w) on the step's batch, in units of the loss, if both are known.
      loss_known: Boolean, whether the step evaluated both losses, as steps with
        ``value_and_grad_fn`` do; otherwise ``loss_rise`` is 0.
    """

    ascent_norm: chex.Array
    sharp_norm: chex.Array
    eps_norm: chex.Array
    cosine: chex.Array
    start_share: chex.Array
    loss_rise: chex.Array
    loss_known: chex.Array


Climb: TypeAlias = dict[str, jax.Array]
"""The fields of :class:`StepInfo` that need the perturbed params."""


def initial(params: Params) -> StepInfo:
    """Before the first step; one buffer per number, as donation must not take a buffer twice."""
    dtype = vectors.accumulator_dtype(trees.inexact_leaves(params))
    numbers = {name: jnp.zeros((), dtype) for name in StepInfo._fields}
    return StepInfo(**{**numbers, "loss_known": jnp.zeros((), bool)})


def no_climb(params: Params) -> Climb:
    """A step that does not perturb: the loss does not rise."""
    zero = jnp.zeros((), vectors.accumulator_dtype(trees.inexact_leaves(params)))
    known = jnp.ones((), bool)
    return {"eps_norm": zero, "start_share": zero, "loss_rise": zero, "loss_known": known}


def climb(
    params: Params,
    start: Params | None,
    point: Params,
    losses: tuple[jax.Array, jax.Array] | None,
    axis_name: AxisName | None,
) -> Climb:
    """A step that perturbs from ``params`` to ``point``, with both losses if they are known."""

    def difference(p: Leaf, q: Leaf) -> jax.Array:
        q = trees.widen(q)
        return q - jnp.asarray(p).astype(q.dtype)

    found = no_climb(params)
    dtype = found["eps_norm"].dtype
    eps = trees.map_inexact(difference, params, point)
    found["eps_norm"] = vectors.norm(eps, axis_name).astype(dtype)
    if start is not None:
        delta = trees.map_inexact(difference, params, start)
        found["start_share"] = vectors.angle(delta, eps, axis_name).cosine.astype(dtype)
    if losses is None:
        found["loss_known"] = jnp.zeros((), bool)
    else:
        found["loss_rise"] = jnp.asarray(losses[1] - losses[0]).astype(dtype)
    return found


def collect(
    ascent_grads: Updates, grads: Updates, seen: Climb, axis_name: AxisName | None
) -> StepInfo:
    """The diagnostics of the step."""
    dtype = seen["eps_norm"].dtype
    norms_and_cosine = vectors.angle(ascent_grads, grads, axis_name)
    g, g_s, cosine = (x.astype(dtype) for x in norms_and_cosine)
    return StepInfo(ascent_norm=g, sharp_norm=g_s, cosine=cosine, **seen)
