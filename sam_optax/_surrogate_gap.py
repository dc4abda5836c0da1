"""GSAM: descent that lowers the surrogate gap, and a radius tied to the learning rate."""

from typing import Any

import chex
import jax.numpy as jnp
import optax

from sam_optax import _hyperparameters as hp
from sam_optax import _projection, _trees
from sam_optax._parallel import AxisName


def surrogate_gap(alpha: hp.Hyperparameter = 0.4) -> optax.GradientTransformationExtraArgs:
    r"""GSAM's change of the sharp gradient, first in the base optimizer's chain.

    .. math::
        g_s - \alpha\, g_\perp, \qquad
        g_\perp = g - \frac{\langle g, g_s \rangle}{\|g_s\|^2}\, g_s,

    with g the ascent gradient and g_s the sharp one, each as one vector over the whole tree. It
    descends on the perturbed loss and, orthogonally to that, ascends on the loss itself, which
    lowers their difference, the surrogate gap.

    GSAM is ``sharpness_aware(optax.chain(surrogate_gap(alpha), base), sam(rho))``, with ``rho``
    from :func:`rho_from_learning_rate` in the paper; with :func:`rsam` in place of ``sam`` it is
    R-GSAM, whose g is the gradient at the random start. Steps that do not perturb have g_⊥ = 0.
    Under ``axis_name`` both gradients are means over the devices; the public code takes the parts
    of each device's own.

    Args:
      alpha: α ≥ 0. Default .4, that of the public code. 0 is SAM.

    Returns:
      An ``optax.GradientTransformationExtraArgs``. It holds no state but for a step count if
      ``alpha`` is a schedule.

    Raises:
      ValueError: ``alpha`` < 0; in ``update``, there are no ``ascent_grads``.

    Example:
      >>> import jax.numpy as jnp, sam_optax
      >>> tx = sam_optax.surrogate_gap(alpha=0.4)
      >>> g, g_sharp = jnp.array([2.0, 0.0]), jnp.array([1.0, 1.0])
      >>> updates, _ = tx.update(g_sharp, tx.init(g_sharp), ascent_grads=g)
      >>> print(f"{updates[0]:.1f} {updates[1]:.1f}")
      0.6 1.4

    References:
      Zhuang et al., `Surrogate Gap Minimization Improves Sharpness-Aware Training
      <https://arxiv.org/abs/2203.08065>`_, 2022.
    """
    hp.check("alpha", alpha, lower=0)

    def init_fn(params: optax.Params) -> optax.OptState:
        del params
        return hp.init_schedules(alpha)

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        ascent_grads: optax.Updates | None = None,
        perturbed: chex.Numeric = True,
        norm_axis_name: AxisName | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        del params
        g = _projection.require_ascent_grads("surrogate_gap", ascent_grads, updates, extra)
        step = hp.step_of(state, None)
        a = _projection.where_perturbed(perturbed, hp.evaluate(alpha, step), 0)
        # g_s − α (g − c g_s) = (1 + α c) g_s − α g.
        c = _projection.coefficient(g, updates, norm_axis_name)
        own = 1 + a.astype(c.dtype) * c

        def gap(g_s: Any, g: Any) -> Any:
            wide = _trees.widen(g_s)
            other = jnp.zeros_like(wide) if g is None else jnp.asarray(g).astype(wide.dtype)
            return _trees.cast_like(
                own.astype(wide.dtype) * wide - a.astype(wide.dtype) * other, g_s
            )

        return _trees.map_inexact(gap, updates, g), hp.advance(state, step)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def rho_from_learning_rate(
    schedule: optax.Schedule,
    rho_min: float,
    rho_max: float,
    lr_min: float,
    lr_max: float,
) -> optax.Schedule:
    r"""A schedule for the radius that follows the learning rate's.

    .. math::
        \rho_t = \rho_{\min} + (\rho_{\max} - \rho_{\min})\,
        \frac{\eta_t - \eta_{\min}}{\eta_{\max} - \eta_{\min}},

    clamped to [ρ_min, ρ_max], so that a warm-up below ``lr_min`` has the radius ρ_min and not a
    negative one. Where ``lr_min == lr_max`` the radius is ρ_max from that learning rate on.

    Args:
      schedule: the learning rate, a function of the training step.
      rho_min: radius at the lowest learning rate, ≥ 0.
      rho_max: radius at the highest, ≥ ``rho_min``.
      lr_min: lowest learning rate, ≥ 0.
      lr_max: highest learning rate, ≥ ``lr_min``.

    Returns:
      A schedule for ``rho`` of any perturbation.

    Raises:
      TypeError: ``schedule`` is no function.
      ValueError: a number out of range.

    Example:
      >>> import optax, sam_optax
      >>> lr = optax.cosine_decay_schedule(1e-3, 100, alpha=0.1)
      >>> rho = sam_optax.rho_from_learning_rate(lr, 0.0, 0.1, 1e-4, 1e-3)
      >>> print(f"{rho(0):.2f} {rho(50):.2f} {rho(100):.2f}")
      0.10 0.05 0.00

    References:
      Zhuang et al., `Surrogate Gap Minimization Improves Sharpness-Aware Training
      <https://arxiv.org/abs/2203.08065>`_, 2022.
    """
    if not callable(schedule):
        raise TypeError(
            f"schedule must be a function of the training step, got {schedule!r}: for a constant "
            "learning rate use a constant rho."
        )
    hp.check_number("rho_min", rho_min, lower=0)
    hp.check_number("rho_max", rho_max, lower=rho_min)
    hp.check_number("lr_min", lr_min, lower=0)
    hp.check_number("lr_max", lr_max, lower=lr_min)

    def rho(step: chex.Numeric) -> chex.Numeric:
        lr = jnp.asarray(schedule(step))
        if lr_max > lr_min:
            share = jnp.clip((lr - lr_min) / (lr_max - lr_min), 0, 1)
        else:
            share = jnp.where(lr >= lr_max, jnp.ones_like(lr), jnp.zeros_like(lr))
        return rho_min + (rho_max - rho_min) * share

    return rho
