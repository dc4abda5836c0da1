"""Stable SAM: the sharp gradient with the length of the ascent gradient."""

from typing import Any

import chex
import jax.numpy as jnp
import optax
from optax import OptState, Params, Updates

from sam_optax._descent.descent import require_ascent_grads, where_perturbed
from sam_optax._internal import vectors
from sam_optax._internal.devices import AxisName


def match_ascent_norm() -> optax.GradientTransformationExtraArgs:
    r"""Stable SAM: rescales the sharp gradient to the length of the ascent gradient.

    .. math::
        \frac{\|g\|}{\|g_s\|}\, g_s,

    with g the ascent gradient and g_s the sharp one, each as one vector over the whole tree. Near
    saddle points and in flat regions g_s can be much shorter or longer than g; with matched
    lengths, SAM can use the learning rates of the base optimizer. If g_s = 0, it stays 0.

    Stable SAM is ``sharpness_aware(base, sam(rho), descent=match_ascent_norm())``.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` without state.

    Raises:
      ValueError: (from ``update``) ``ascent_grads`` is missing.

    Example:
      >>> import jax.numpy as jnp, sam_optax
      >>> tx = sam_optax.match_ascent_norm()
      >>> g, g_sharp = jnp.array([1.0, 0.0]), jnp.array([3.0, 4.0])
      >>> updates, _ = tx.update(g_sharp, tx.init(g), ascent_grads=g)
      >>> print(f"{updates[0]:.1f} {updates[1]:.1f}")
      0.6 0.8

    References:
      Tan et al., `Stabilizing Sharpness-Aware Minimization Through A Simple Renormalization
      Strategy <https://arxiv.org/abs/2401.07250>`_, 2024.
    """

    def update_fn(
        updates: Updates,
        state: OptState,
        params: Params | None = None,
        *,
        ascent_grads: Updates | None = None,
        perturbed: chex.Numeric = True,
        norm_axis_name: AxisName | None = None,
        **extra: Any,
    ) -> tuple[Updates, OptState]:
        del params
        g = require_ascent_grads("match_ascent_norm", ascent_grads, updates, extra)
        wanted, length = vectors.norm(g, norm_axis_name), vectors.norm(updates, norm_axis_name)
        ratio = where_perturbed(perturbed, wanted / jnp.where(length > 0, length, 1), 1)
        return vectors.rescaled(updates, ratio), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update_fn)
