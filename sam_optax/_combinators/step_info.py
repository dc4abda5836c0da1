"""Diagnostics of a run: scalars of the last step, kept in the state on request."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
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
      loss_rise: L(w + ε) − L(w) on the step's batch, in units of the loss, if both losses are
        known.
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


class Climb(NamedTuple):
    """Diagnostics that need the perturbed params: see :class:`StepInfo`."""

    eps_norm: chex.Array
    start_share: chex.Array
    loss_rise: chex.Array
    loss_known: chex.Array


def dtype_of(params: Params) -> np.dtype:
    """The dtype of all numbers."""
    return vectors.accumulator_dtype(trees.inexact_leaves(params))


def initial(params: Params) -> StepInfo:
    """Before the first step; one buffer per number, as donation must not take a buffer twice."""
    dtype = dtype_of(params)
    numbers = {name: jnp.zeros((), dtype) for name in StepInfo._fields}
    return StepInfo(**{**numbers, "loss_known": jnp.zeros((), bool)})


def no_climb(params: Params) -> Climb:
    """A step that does not perturb: the loss does not rise."""
    dtype = dtype_of(params)
    zero = jnp.zeros((), dtype)
    return Climb(zero, zero, zero, jnp.ones((), bool))


def climb(
    params: Params,
    start: Params | None,
    point: Params,
    losses: tuple[jax.Array, jax.Array] | None,
    axis_name: AxisName | None,
) -> Climb:
    """A step that perturbs from ``params`` to ``point``, with both losses if they are known."""
    dtype = dtype_of(params)

    def difference(p: Leaf, q: Leaf) -> jax.Array:
        q = trees.widen(q)
        return q - jnp.asarray(p).astype(q.dtype)

    eps = trees.map_inexact(difference, params, point)
    share = jnp.zeros((), dtype)
    if start is not None:
        delta = trees.map_inexact(difference, params, start)
        share = vectors.angle(delta, eps, axis_name).cosine.astype(dtype)
    rise = jnp.zeros((), dtype) if losses is None else losses[1] - losses[0]
    return Climb(
        vectors.norm(eps, axis_name).astype(dtype),
        share,
        jnp.asarray(rise).astype(dtype),
        jnp.full((), losses is not None),
    )


def collect(
    ascent_grads: Updates, grads: Updates, seen: Climb, axis_name: AxisName | None
) -> StepInfo:
    """The diagnostics of the step."""
    dtype = seen.eps_norm.dtype
    angle = vectors.angle(ascent_grads, grads, axis_name)
    return StepInfo(
        ascent_norm=angle.norm_a.astype(dtype),
        sharp_norm=angle.norm_b.astype(dtype),
        cosine=angle.cosine.astype(dtype),
        **seen._asdict(),
    )
