"""LookSAM's transformation: reuses SAM's correction of the gradient between perturbing steps."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from chex import Array, Numeric
from optax import Params, Updates

from sam_optax._descent.descent import descent, require_ascent_grads
from sam_optax._internal import control_flow, trees, vectors
from sam_optax._internal import hyperparameters as hp
from sam_optax._internal.devices import AxisName


class ReuseOrthogonalState(NamedTuple):
    """State of :func:`sam_optax.reuse_orthogonal`.

    Attributes:
      g_v: the component of the sharp gradient orthogonal to the ascent gradient at the last step
        that perturbed, 0 before, like the params; ``None`` in place of non-float leaves.
      norm: ‖g_v‖, float32 (or wider) scalar.
    """

    g_v: Updates
    norm: Array


def reuse_orthogonal(alpha: hp.Hyperparameter = 0.7) -> optax.GradientTransformationExtraArgs:
    r"""Reuses the part of the sharp gradient that leads to flat regions, between SAM steps.

    .. math::
        g_v = g_s - \frac{\langle g_s, g \rangle}{\|g\|^2}\, g
        \quad \text{at a step that perturbs;} \qquad
        g + \alpha\, \frac{\|g\|}{\|g_v\|}\, g_v \quad \text{at other steps,}

    with inner products and norms over the whole tree as one vector. Steps that perturb keep their
    sharp gradient g_s. Other steps keep g if g_v is no larger than rounding error, or none yet.

    LookSAM is ``sharpness_aware(base, sam(rho), descent=reuse_orthogonal(alpha), when=every(k))``.
    A step costs 1 + 1/k gradients on average.

    Args:
      alpha: α ≥ 0, the size of the reused part relative to the gradient. Default 0.7, as in the
        public implementations of LookSAM. 0 is SAM every k steps.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` with a :class:`ReuseOrthogonalState`.

    Raises:
      ValueError: ``alpha`` < 0; in ``update``, ``ascent_grads`` is missing.

    Example:
      >>> import jax.numpy as jnp, sam_optax
      >>> tx = sam_optax.reuse_orthogonal(alpha=0.5)
      >>> g, g_sharp = jnp.array([1.0, 1.0]), jnp.array([2.0, 0.0])
      >>> _, state = tx.update(g_sharp, tx.init(g), ascent_grads=g, perturbed=True)
      >>> print(state.g_v.round(4))
      [ 1. -1.]
      >>> updates, state = tx.update(g, state, ascent_grads=g, perturbed=False)
      >>> print(updates.round(4))
      [1.5 0.5]

    References:
      Liu et al., `Towards Efficient and Scalable Sharpness-Aware Minimization
      <https://arxiv.org/abs/2203.02714>`_, 2022.
    """
    hp.check("alpha", alpha, lower=0)

    def init_fn(params: Params) -> ReuseOrthogonalState:
        g_v = trees.inexact_zeros(params)
        return ReuseOrthogonalState(g_v, jnp.zeros((), vectors.norm(g_v).dtype))

    def update_fn(
        updates: Updates,
        state: ReuseOrthogonalState,
        params: Params | None = None,
        *,
        alpha: Numeric,
        ascent_grads: Updates | None = None,
        perturbed: Numeric = True,
        norm_axis_name: AxisName | None = None,
        **extra: Any,
    ) -> tuple[Updates, ReuseOrthogonalState]:
        g = require_ascent_grads("reuse_orthogonal", ascent_grads, updates, extra)

        def remember() -> tuple[Updates, ReuseOrthogonalState]:
            rest, norm = vectors.reject(updates, g, norm_axis_name)
            g_v = trees.cast_tree_like(rest, state.g_v)
            return updates, ReuseOrthogonalState(g_v, norm.astype(state.norm.dtype))

        def reuse() -> tuple[Updates, ReuseOrthogonalState]:
            share = vectors.norm(updates, norm_axis_name) / jnp.where(state.norm > 0, state.norm, 1)
            share = share * jnp.asarray(alpha).astype(share.dtype)
            mixed = vectors.combine(updates, state.g_v, share)
            return trees.map_inexact(trees.cast_like, mixed, updates), state

        return control_flow.cond(perturbed, remember, reuse)

    return descent(init_fn, update_fn, alpha=alpha)
