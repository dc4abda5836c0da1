"""Weighted sums of the plain and the sharp gradient."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax

from sam_optax._descent.ascent_grads import require_ascent_grads, where_perturbed
from sam_optax._internal import hyperparameters as hp
from sam_optax._internal import trees
from sam_optax._internal.types import Leaf


def mix_gradients(weight: hp.Hyperparameter) -> optax.GradientTransformationExtraArgs:
    r"""Replaces the sharp gradient by a weighted sum of the plain and the sharp gradient.

    .. math::
        (1 - \alpha)\, g + \alpha\, g_s,

    with g the ascent gradient and g_s the sharp one. It goes first in the base optimizer's chain.
    To first order in ρ it is the gradient of L + αρ‖∇L‖. Steps that do not perturb keep their
    gradient.

    * Penalizing the gradient norm (Zhao et al.): a penalty λ‖∇L‖ and SAM's radius r give
      α = λ/r, the paper's balance coefficient.
    * WSAM (Yue et al.): the sharpness is weighted by α = γ/(1 − γ); γ = ½ is SAM. ``mix_gradients``
      is the coupled form, :func:`decoupled_sharpness` the decoupled one.

    Args:
      weight: α ≥ 0. 0 is the base optimizer, 1 is SAM, and values above 1 extrapolate.

    Returns:
      An ``optax.GradientTransformationExtraArgs``. Its state is empty unless ``weight`` is a
      schedule, which needs a step count.

    Raises:
      ValueError: ``weight`` < 0; in ``update``, ``ascent_grads`` is missing.

    Example:
      >>> import optax, sam_optax
      >>> gamma = 0.8
      >>> wsam = sam_optax.sharpness_aware(
      ...     optax.chain(sam_optax.mix_gradients(gamma / (1 - gamma)), optax.adam(1e-3)),
      ...     sam_optax.sam(rho=0.05))

    References:
      Zhao et al., `Penalizing Gradient Norm for Efficiently Improving Generalization in Deep
      Learning <https://arxiv.org/abs/2202.03599>`_, 2022. Yue et al., `Sharpness-Aware
      Minimization Revisited: Weighted Sharpness as a Regularization Term
      <https://arxiv.org/abs/2305.15817>`_, 2023.
    """
    hp.check("weight", weight, lower=0)

    def init_fn(params: optax.Params) -> optax.OptState:
        del params
        return hp.init_schedules(weight)

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        ascent_grads: optax.Updates | None = None,
        perturbed: chex.Numeric = True,
        **extra: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        del params
        g = require_ascent_grads("mix_gradients", ascent_grads, updates, extra)
        step = hp.step_of(state, None)
        # With weight 1, the gradient of a step that does not perturb is unchanged.
        alpha = where_perturbed(perturbed, hp.evaluate(weight, step), 1)
        mixed = trees.map_inexact(
            lambda g_s, x: trees.cast_like(mix(g_s, x, alpha), g_s), updates, g
        )
        return mixed, hp.advance(state, step)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def mix(g_s: Leaf, g: Leaf, alpha: jax.Array) -> jax.Array:
    """(1 − α) g + α g_s, in float32 or wider."""
    sharp = trees.widen(g_s)
    if g is None:
        return sharp
    a = alpha.astype(sharp.dtype)
    return (1 - a) * jnp.asarray(g).astype(sharp.dtype) + a * sharp


def decoupled_sharpness(
    base_tx: optax.GradientTransformation,
    learning_rate: hp.Hyperparameter,
    weight: hp.Hyperparameter,
) -> optax.GradientTransformationExtraArgs:
    r"""WSAM's decoupled form: subtracts the gradient of the sharpness outside the base optimizer.

    .. math::
        \mathrm{base\_tx}(g) - \eta\, \alpha\, (g_s - g), \qquad \alpha = \gamma / (1 - \gamma),

    with g the ascent gradient and g_s the sharp one: momentum and second moments are computed from
    the plain gradient only. It is the default of WSAM's public code. For plain SGD both forms
    agree.

    Args:
      base_tx: the base optimizer, any optax transformation.
      learning_rate: η ≥ 0, usually that of ``base_tx``.
      weight: α = γ/(1 − γ) ≥ 0; γ = 0.9 of the public code is α = 9.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` to use as the base optimizer of
      :func:`sharpness_aware`. Its state is a pair: the state of the schedules (or empty) and that
      of ``base_tx``.

    Raises:
      TypeError: ``base_tx`` is not a gradient transformation.
      ValueError: a hyperparameter is out of range; in ``update``, ``ascent_grads`` is missing.

    Example:
      >>> import optax, sam_optax
      >>> base = sam_optax.decoupled_sharpness(optax.adam(1e-3), 1e-3, weight=9.0)
      >>> wsam = sam_optax.sharpness_aware(base, sam_optax.sam(rho=0.05))

    References:
      Yue et al., `Sharpness-Aware Minimization Revisited: Weighted Sharpness as a Regularization
      Term <https://arxiv.org/abs/2305.15817>`_, 2023.
    """
    hp.check_transformation("base_tx", base_tx)
    hp.check("learning_rate", learning_rate, lower=0)
    hp.check("weight", weight, lower=0)
    base = optax.with_extra_args_support(base_tx)

    def init_fn(params: optax.Params) -> tuple[optax.OptState, optax.OptState]:
        return hp.init_schedules(learning_rate, weight), base.init(params)

    def update_fn(
        updates: optax.Updates,
        state: tuple[optax.OptState, optax.OptState],
        params: optax.Params | None = None,
        *,
        ascent_grads: optax.Updates | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, tuple[optax.OptState, optax.OptState]]:
        g = require_ascent_grads("decoupled_sharpness", ascent_grads, updates, extra)
        schedule, base_state = state
        step = hp.step_of(schedule, None)
        eta = jnp.asarray(hp.evaluate(learning_rate, step))
        alpha = jnp.asarray(hp.evaluate(weight, step))
        base_updates, base_state = base.update(g, base_state, params, ascent_grads=g, **extra)

        def subtract(u: Leaf, g_s: Leaf, x: Leaf) -> Leaf:
            if g_s is None or x is None:
                return u
            wide, sharp = trees.widen(u), trees.widen(g_s)
            rise = sharp - jnp.asarray(x).astype(sharp.dtype)
            change = eta.astype(rise.dtype) * alpha.astype(rise.dtype) * rise
            return trees.cast_like(wide - change.astype(wide.dtype), u)

        moved = trees.map_inexact(subtract, base_updates, updates, g)
        return moved, (hp.advance(schedule, step), base_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
