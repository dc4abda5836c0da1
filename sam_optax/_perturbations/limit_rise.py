"""LE-SAM: bounds the rise of the linearized loss instead of the radius."""

from typing import Any

import jax.numpy as jnp
import optax
from chex import Numeric
from optax import OptState, Params, Updates

from sam_optax._internal import hyperparameters as hp
from sam_optax._internal import vectors
from sam_optax._perturbations.perturbation import Perturbation, as_perturbation


def limit_rise(perturbation: optax.GradientTransformation, tau: hp.Hyperparameter) -> Perturbation:
    r"""LE-SAM: shortens the perturbation ε so that it raises the loss by at most ``tau``.

    .. math::
        \varepsilon = \min\left(1, \frac{\tau}{\langle g, \varepsilon_0 \rangle}\right)
        \varepsilon_0, \qquad \varepsilon_0 = \mathrm{perturbation}(g),

    with g the ascent gradient; ε₀ is unchanged if ⟨g, ε₀⟩ ≤ τ. ``limit_rise(sam(rho), tau)`` is
    LE-SAM, with the radius min(ρ, τ/‖g‖): large gradients, early in training or on hard batches,
    give a short ε. The bound holds to first order, from the start of :func:`rsam` and other random
    starts, and for each of several ``ascent_steps``.

    Args:
      perturbation: any perturbation, except ``momentum_start`` and ``low_pass``, whose ε precedes
        the gradient: put ``limit_rise`` inside, ``momentum_start(limit_rise(sam(rho), tau))``. Its
        radius is the upper bound.
      tau: budget τ > 0, in units of the loss, or a schedule. LE-SAM decays it to 0 at the end.

    Returns:
      A :class:`~sam_optax.Perturbation`, with a start if ``perturbation`` has one.

    Raises:
      ValueError: ``tau`` ≤ 0, or ``perturbation`` computes ε before the gradient.

    Example:
      >>> import jax.numpy as jnp, sam_optax
      >>> method = sam_optax.limit_rise(sam_optax.sam(rho=1.0), tau=0.2)
      >>> for g in (jnp.array([0.1]), jnp.array([4.0])):
      ...     eps, _ = method.update(g, method.init(g), g)
      ...     print(eps)
      [1.]
      [0.05]

    References:
      Wang et al., `Fix the Loss, Not the Radius: Rethinking the Adversarial Perturbation of
      Sharpness-Aware Minimization <https://arxiv.org/abs/2605.10183>`_, 2026.
    """
    hp.check("tau", tau, lower=0, lower_allowed=False)
    inner = as_perturbation(perturbation)
    if inner.single_pass:
        raise ValueError(
            "perturbation computes eps before there is a gradient (momentum_start, low_pass): put "
            "limit_rise inside it, as in momentum_start(limit_rise(sam(), tau))."
        )

    def update_fn(
        updates: Updates, state: OptState, params: Params | None, tau: Numeric, **extra: Any
    ) -> tuple[Updates, OptState]:
        eps, state = inner.update(updates, state, params, **extra)
        rise = vectors.inner(extra["ascent_grads"], eps, extra["norm_axis_name"])
        budget = jnp.asarray(tau).astype(rise.dtype)
        share = jnp.where(rise > budget, budget / jnp.where(rise > budget, rise, 1), 1)
        return vectors.rescaled(eps, share), state

    def start_fn(params: Params, state: OptState, tau: Numeric, **extra: Any) -> Params:
        return inner.start_fn(params, state, **extra)

    return Perturbation.around(inner, inner.init, update_fn, start_fn, hyperparameters={"tau": tau})
