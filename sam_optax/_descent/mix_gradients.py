"""Weighted sums of the plain and the sharp gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from chex import Numeric
from optax import OptState, Params, Updates

from sam_optax._descent import descent as role
from sam_optax._internal import hyperparameters as hp
from sam_optax._internal import roles, trees, vectors
from sam_optax._internal.devices import AxisName
from sam_optax._internal.types import Leaf


def mix_gradients(weight: hp.Hyperparameter) -> optax.GradientTransformationExtraArgs:
    r"""Replaces the sharp gradient by a weighted sum of the plain and the sharp gradient.

    .. math::
        (1 - \alpha)\, g + \alpha\, g_s,

    with g the ascent gradient and g_s the sharp one. To first order in ρ it is the gradient of L +
    αρ‖∇L‖. Steps that do not perturb keep their gradient.

    * Penalizing the gradient norm (Zhao et al.): a penalty λ‖∇L‖ and SAM's radius r give
      α = λ/r, the paper's balance coefficient.
    * WSAM (Yue et al.): the sharpness is weighted by α = γ/(1 − γ); γ = ½ is SAM. ``mix_gradients``
      is the coupled form, :func:`decoupled_sharpness` the decoupled one.

    Args:
      weight: α ≥ 0. 0 is the base optimizer, 1 is SAM, and values above 1 extrapolate.

    Returns:
      An ``optax.GradientTransformationExtraArgs``, without state unless ``weight`` is a schedule.

    Raises:
      ValueError: ``weight`` < 0; in ``update``, ``ascent_grads`` is missing.

    Example:
      >>> import optax, sam_optax
      >>> gamma = 0.8
      >>> wsam = sam_optax.sharpness_aware(
      ...     optax.adam(1e-3), sam_optax.sam(rho=0.05),
      ...     descent=sam_optax.mix_gradients(gamma / (1 - gamma)))

    References:
      Zhao et al., `Penalizing Gradient Norm for Efficiently Improving Generalization in Deep
      Learning <https://arxiv.org/abs/2202.03599>`_, 2022. Yue et al., `Sharpness-Aware
      Minimization Revisited: Weighted Sharpness as a Regularization Term
      <https://arxiv.org/abs/2305.15817>`_, 2023.
    """
    hp.check("weight", weight, lower=0)

    def combine(
        g_s: Updates, g: Updates, perturbed: Numeric, axis: AxisName | None, weight: Numeric
    ) -> Updates:
        # With weight 1, the gradient of a step that does not perturb is unchanged.
        return mix(g_s, g, role.where_perturbed(perturbed, weight, 1))

    return role.of_both_gradients("mix_gradients", combine, weight=weight)


def mix(sharp: Updates, ascent: Updates, alpha: jax.Array) -> Updates:
    """(1 − α) g + α g_s, in the dtypes of g_s."""

    def leaf(g_s: jax.Array, g: Leaf) -> jax.Array:
        if g is None:
            return g_s
        a = alpha.astype(g_s.dtype)
        return (1 - a) * jnp.asarray(g).astype(g_s.dtype) + a * g_s

    return trees.map_wide(leaf, sharp, ascent)


def decoupled_sharpness(
    base_tx: optax.GradientTransformation,
    learning_rate: hp.Hyperparameter,
    weight: hp.Hyperparameter,
) -> optax.GradientTransformationExtraArgs:
    r"""WSAM's decoupled form: subtracts the gradient of the sharpness outside the base optimizer.

    .. math::
        \mathrm{base\_tx}(g) - \eta\, \alpha\, (g_s - g), \qquad \alpha = \gamma / (1 - \gamma),

    with g the ascent gradient and g_s the sharp one: momentum and second moments are computed from
    the plain gradient only. It is the default of WSAM's public code; for plain SGD it agrees with
    :func:`mix_gradients`. It is the descent *around* its base optimizer, so the base optimizer of
    the step is ``optax.identity()``.

    Args:
      base_tx: the base optimizer, any optax transformation. In a step that does not perturb, it
        is all that happens.
      learning_rate: η ≥ 0, usually that of ``base_tx``.
      weight: α = γ/(1 − γ) ≥ 0; γ = 0.9 of the public code is α = 9.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` for ``descent=``. Its state is that of
      ``base_tx``, which receives the caller's arguments and none of those of a descent.

    Raises:
      TypeError: ``base_tx`` is not a gradient transformation.
      ValueError: a hyperparameter is out of range; in ``update``, ``ascent_grads`` is missing.

    Example:
      >>> import optax, sam_optax
      >>> wsam = sam_optax.sharpness_aware(
      ...     optax.identity(), sam_optax.sam(rho=0.05),
      ...     descent=sam_optax.decoupled_sharpness(optax.adam(1e-3), 1e-3, weight=9.0))

    References:
      Yue et al., `Sharpness-Aware Minimization Revisited: Weighted Sharpness as a Regularization
      Term <https://arxiv.org/abs/2305.15817>`_, 2023.
    """
    hp.check_transformation("base_tx", base_tx)
    hp.check("learning_rate", learning_rate, lower=0)
    hp.check("weight", weight, lower=0)
    base = roles.open_to_arguments(base_tx)

    def update_fn(
        updates: Updates,
        state: OptState,
        params: Params | None = None,
        *,
        learning_rate: Numeric,
        weight: Numeric,
        ascent_grads: Updates | None = None,
        perturbed: Numeric = True,
        **extra: Any,
    ) -> tuple[Updates, OptState]:
        g = role.require_ascent_grads("decoupled_sharpness", ascent_grads, updates, extra)
        # A step that does not perturb has no rise, whatever a piece before made of its gradient.
        weight = role.where_perturbed(perturbed, weight, 0)
        given = {name: value for name, value in extra.items() if name not in roles.FOR_DESCENTS}
        base_updates, state = base.update(g, state, params, **given)

        def subtract(u: jax.Array, g_s: Leaf, x: Leaf) -> jax.Array:
            if g_s is None or x is None:
                return u
            sharp = trees.widen(g_s)
            rise = sharp - jnp.asarray(x).astype(sharp.dtype)
            return u - vectors.times(rise, learning_rate, weight).astype(u.dtype)

        return trees.map_wide(subtract, base_updates, updates, g), state

    return role.descent(base.init, update_fn, learning_rate=learning_rate, weight=weight)
