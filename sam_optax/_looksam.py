"""LookSAM: what SAM adds to the gradient, computed every k steps and reused in between."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from sam_optax import _control, _projection, _trees
from sam_optax import _hyperparameters as hp
from sam_optax._parallel import AxisName
from sam_optax._sam import sam
from sam_optax._sharpness_aware import sharpness_aware
from sam_optax._when import every


class ReuseOrthogonalState(NamedTuple):
    """State of :func:`sam_optax.reuse_orthogonal`.

    Attributes:
      g_v: the sharp gradient's part that is orthogonal to the ascent gradient, at the last step
        that perturbed: structure, shapes and dtypes of the params; ``None`` in place of leaves
        that are not inexact. 0 before the first such step.
      norm: ‖g_v‖, float32 (or wider) scalar.
      schedule: :class:`~sam_optax.ScheduleState` if ``alpha`` is a schedule, else
        ``optax.EmptyState``.
    """

    g_v: optax.Updates
    norm: chex.Array
    schedule: Any


def reuse_orthogonal(alpha: hp.Hyperparameter = 0.7) -> optax.GradientTransformationExtraArgs:
    r"""Reuses the part of the sharp gradient that leads to flat regions, between SAM steps.

    .. math::
        g_v = g_s - \frac{\langle g_s, g \rangle}{\|g\|^2}\, g
        \quad \text{at a step that perturbs;} \qquad
        g + \alpha\, \frac{\|g\|}{\|g_v\|}\, g_v \quad \text{at the others,}

    with inner products and norms over the whole tree as one vector. Steps that perturb keep their
    sharp gradient g_s. Where g_v is as small as rounding, or no step has perturbed yet, the
    others keep g.

    It belongs first in the base optimizer's chain of a ``sharpness_aware`` with ``when``:
    :func:`looksam` is the usual composition.

    Args:
      alpha: α ≥ 0, the size of the reused part relative to the gradient. Default .7, as in the
        public implementations of LookSAM. 0 is SAM every k steps.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` with a :class:`ReuseOrthogonalState`.

    Raises:
      ValueError: ``alpha`` < 0; in ``update``, there are no ``ascent_grads``.

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

    def init_fn(params: optax.Params) -> ReuseOrthogonalState:
        g_v = _trees.inexact_zeros(params)
        return ReuseOrthogonalState(
            g_v=g_v,
            norm=jnp.zeros((), _projection.norm_of(g_v).dtype),
            schedule=hp.init_schedules(alpha),
        )

    def update_fn(
        updates: optax.Updates,
        state: ReuseOrthogonalState,
        params: optax.Params | None = None,
        *,
        ascent_grads: optax.Updates | None = None,
        perturbed: chex.Numeric = True,
        norm_axis_name: AxisName | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, ReuseOrthogonalState]:
        del params
        g = _projection.require_ascent_grads("reuse_orthogonal", ascent_grads, updates, extra)
        step = hp.step_of(state.schedule, None)

        def remember() -> tuple[Any, Any, jax.Array]:
            rest, norm = _projection.reject(updates, g, norm_axis_name)
            g_v = jax.tree.map(
                lambda old, new: None if old is None else _trees.cast_like(new, old),
                state.g_v,
                rest,
                is_leaf=lambda leaf: leaf is None,
            )
            return updates, g_v, norm.astype(state.norm.dtype)

        def reuse() -> tuple[Any, Any, jax.Array]:
            share = _projection.norm_of(updates, norm_axis_name) / jnp.where(
                state.norm > 0, state.norm, 1
            )
            share = share * jnp.asarray(hp.evaluate(alpha, step)).astype(share.dtype)
            mixed = _projection.combine(updates, state.g_v, share)
            return _trees.map_inexact(_trees.cast_like, mixed, updates), state.g_v, state.norm

        new_updates, g_v, norm = _control.cond(perturbed, remember, reuse)
        return new_updates, ReuseOrthogonalState(g_v, norm, hp.advance(state.schedule, step))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def looksam(
    base_tx: optax.GradientTransformation,
    rho: hp.Hyperparameter = 0.05,
    k: int = hp.static_default(5),
    alpha: hp.Hyperparameter = 0.7,
) -> optax.GradientTransformationExtraArgs:
    r"""LookSAM: SAM at every k-th step, and what it adds reused in between.

    .. math::
        g_t = \begin{cases}
            g_s = \nabla L(w + \rho\, g/\|g\|) & t \bmod k = 0, \\
            g + \alpha\, \|g\|\, g_v/\|g_v\| & \text{else,}
        \end{cases}

    where g = ∇L(w) and g_v is g_s without its part along g. A step costs 1 + 1/k gradients in
    the mean and one copy of the gradient in memory. It is short for
    ``sharpness_aware(optax.chain(reuse_orthogonal(alpha), base_tx), sam(rho), when=every(k))``:
    write that out for another perturbation or for further options.

    Args:
      base_tx: the base optimizer, any optax transformation.
      rho: radius ρ ≥ 0. Default .05, SAM's.
      k: period of the SAM steps, an integer ≥ 1. Default 5; 1 is SAM.
      alpha: see :func:`reuse_orthogonal`.

    Returns:
      What :func:`sharpness_aware` returns, to be used in the same way.

    Raises:
      TypeError: ``base_tx`` is not a gradient transformation.
      ValueError: a hyperparameter out of range.

    Example:
      >>> import optax, sam_optax
      >>> tx = sam_optax.looksam(optax.adamw(1e-3), rho=0.1, k=5, alpha=0.7)

    References:
      Liu et al., `Towards Efficient and Scalable Sharpness-Aware Minimization
      <https://arxiv.org/abs/2203.02714>`_, 2022.
    """
    hp.check_transformation("base_tx", base_tx)
    return sharpness_aware(optax.chain(reuse_orthogonal(alpha), base_tx), sam(rho), when=every(k))
