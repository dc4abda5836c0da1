"""XSAM: descent away from the direction of highest loss."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from chex import Array, Numeric
from jax import lax
from optax import Params, Updates

from sam_optax._descent.descent import require_ascent_grads
from sam_optax._internal import control_flow, trees, vectors
from sam_optax._internal import hyperparameters as hp
from sam_optax._internal.devices import AxisName


class TowardMaximumState(NamedTuple):
    """State of :func:`sam_optax.toward_maximum`.

    Attributes:
      step: int32 scalar, the number of steps taken.
      alpha: float32 (or wider) scalar, the α of the last search.
    """

    step: Array
    alpha: Array


def toward_maximum(
    rho: Numeric, every: int = 100, *, largest: float = 2.0, candidates: int = 21
) -> optax.GradientTransformationExtraArgs:
    r"""XSAM: descends against the direction of highest loss in the plane of both gradients.

    .. math::
        \|g_s\|\, d(\alpha^*), \qquad
        d(\alpha) = \frac{\sin((1 - \alpha)\psi)\, \frac{g}{\|g\|}
            + \sin(\alpha\psi)\, \frac{g_s}{\|g_s\|}}{\sin\psi}, \qquad
        \alpha^* = \arg\max_\alpha L(w + \rho\, d(\alpha)),

    with g the ascent gradient, g_s the sharp one and ψ the angle between them: α = 0 is along g, α
    = 1 is SAM, and a larger α lies beyond g_s. XSAM is
    ``sharpness_aware(base, sam(rho), descent=toward_maximum(rho))``, in a loop that passes the loss
    on the step's batch, ``tx.update(None, state, params, value_fn=loss)``. Every ``every``
    steps, a search for α costs ``candidates`` forward passes; α is kept in between.

    The unit vector g/‖g‖ is the direction of ε for :func:`sam` with one ascent step; after several
    the paper uses that of ε instead, so this is not XSAM then. Steps that do not perturb keep their
    gradient. With ``axis_name``, ``value_fn`` must return the mean over the devices.

    Args:
      rho: radius ρ > 0 of the search, a number or a JAX scalar (traced or not), ``rho_max`` in the
        public code; it may differ from the radius of the perturbation.
      every: steps between two searches, an integer ≥ 1. Default 100; the public code searches once
        per epoch, and by default not at all: its α = 1 is SAM.
      largest: the largest α of the search, > 0. Default 2, the public code's.
      candidates: number ≥ 2 of evenly spaced α from 0 to ``largest``. Default 21, as there.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` with a :class:`TowardMaximumState`.

    Raises:
      ValueError: an argument is out of range; in ``update``, ``params``, ``ascent_grads`` or
        ``value_fn`` is missing.

    Example:
      >>> import jax.numpy as jnp, optax, sam_optax
      >>> tx = sam_optax.sharpness_aware(
      ...     optax.sgd(0.1), sam_optax.sam(rho=1.0), descent=sam_optax.toward_maximum(rho=1.0))
      >>> w = jnp.array([1.0, 0.1])
      >>> loss = lambda w: 0.5 * (w[0] ** 2 + 20 * w[1] ** 2)
      >>> updates, state = tx.update(None, tx.init(w), w, value_fn=loss)
      >>> print(state.base_state[0].alpha)  # the maximum lies beyond the sharp gradient
      1.1

    References:
      Chen and Zhou, `Revisiting Sharpness-Aware Minimization: A More Faithful and Effective
      Implementation <https://arxiv.org/abs/2603.10048>`_, 2026.
    """
    hp.check("rho", rho, lower=0, lower_allowed=False, schedule=False)
    hp.check_integer("every", every, lower=1)
    hp.check_number("largest", largest, lower=0, lower_allowed=False)
    hp.check_integer("candidates", candidates, lower=2)

    def init_fn(params: Params) -> TowardMaximumState:
        dtype = vectors.accumulator_dtype(trees.inexact_leaves(params))
        return TowardMaximumState(jnp.zeros((), jnp.int32), jnp.ones((), dtype))

    def update_fn(
        updates: Updates,
        state: TowardMaximumState,
        params: Params | None = None,
        *,
        ascent_grads: Updates | None = None,
        perturbed: Numeric = True,
        value_fn: Callable[[Params], Numeric] | None = None,
        norm_axis_name: AxisName | None = None,
        **extra: Any,
    ) -> tuple[Updates, TowardMaximumState]:
        g = require_ascent_grads("toward_maximum", ascent_grads, updates, extra)
        if value_fn is None or params is None:
            raise ValueError(
                "toward_maximum needs the loss and the params: call update(grads, state, params, "
                "value_fn=loss), with the loss on the step's batch."
            )
        angle = vectors.angle(g, updates, norm_axis_name)

        def search() -> jax.Array:
            alphas = jnp.linspace(0, largest, candidates, dtype=state.alpha.dtype)
            radius = jnp.asarray(rho, state.alpha.dtype)
            losses = lax.map(
                lambda a: value_fn(trees.add(params, _along(angle, g, updates, a, radius))), alphas
            )
            return alphas[jnp.argmax(losses)]

        due = jnp.asarray(perturbed) & (state.step % every == 0)
        alpha = control_flow.cond(due, search, lambda: state.alpha)
        moved = trees.map_inexact(
            lambda m, g_s: jnp.where(perturbed, trees.cast_like(m, g_s), g_s),
            _along(angle, g, updates, alpha, angle.norm_b),
            updates,
        )
        return moved, TowardMaximumState(optax.safe_increment(state.step), alpha)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _along(
    angle: vectors.Angle, g: Updates, g_s: Updates, alpha: jax.Array, length: jax.Array
) -> Updates:
    """A vector of the given length along d(α)."""
    of_g, of_g_s = _coefficients(angle.cosine, alpha)
    of_g = length * of_g / jnp.where(angle.norm_a > 0, angle.norm_a, 1)
    of_g_s = length * of_g_s / jnp.where(angle.norm_b > 0, angle.norm_b, 1)
    scaled = trees.map_inexact(lambda x: vectors.times(trees.widen(x), of_g_s), g_s)
    return vectors.combine(scaled, trees.inexact_only(g), of_g)


def _coefficients(cosine: jax.Array, alpha: jax.Array) -> tuple[jax.Array, jax.Array]:
    """sin((1 − α)ψ)/sin ψ and sin(αψ)/sin ψ; their limits for ψ → 0, and (0, 1) for ψ → π."""
    psi = jnp.arccos(cosine)
    sine = jnp.sin(psi)
    straight = sine < 1e-3
    safe = jnp.where(straight, 1, sine)
    first = jnp.where(cosine > 0, 1 - alpha, 0)
    second = jnp.where(cosine > 0, alpha, 1)
    return (
        jnp.where(straight, first, jnp.sin((1 - alpha) * psi) / safe),
        jnp.where(straight, second, jnp.sin(alpha * psi) / safe),
    )
