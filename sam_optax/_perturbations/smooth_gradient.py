"""VaSSO's ascent direction: a moving average that suppresses mini-batch noise."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from sam_optax._internal import hyperparameters as hp
from sam_optax._internal import trees
from sam_optax._internal.types import Leaf
from sam_optax._perturbations.perturbation import Perturbation


class SmoothGradientState(NamedTuple):
    """State of :func:`sam_optax.smooth_gradient`.

    Attributes:
      ema: d, the average, with the structure, shapes and dtypes of the params; ``None`` in place of
        non-float leaves.
      schedule: :class:`~sam_optax.ScheduleState` if ``theta`` is a schedule, else
        ``optax.EmptyState``.
    """

    ema: optax.Updates
    schedule: hp.ScheduleState | optax.EmptyState


def smooth_gradient(theta: hp.Hyperparameter = 0.4) -> Perturbation:
    r"""VaSSO: replaces the ascent gradient by an exponential moving average of ascent gradients.

    .. math::
        d_t = (1 - \theta)\, d_{t-1} + \theta\, g_t, \qquad d_0 = 0.

    VaSSO is ``optax.chain(smooth_gradient(theta), sam(rho))``, with ε = ρ d/‖d‖. Starting from zero
    needs no bias correction, because ``sam`` does not depend on the length of d. It is the opposite
    of :func:`remove_full_gradient`, which ascends along the noise that is averaged out here.

    Args:
      theta: θ in (0, 1], the weight of the new gradient. Default 0.4; published values are between
        0.2 and 0.9. 1 leaves the gradient unchanged.

    Returns:
      A :class:`~sam_optax.Perturbation` that maps g to d, in the dtypes of the gradient, for use
      in ``optax.chain``. Its state is one copy of the gradient.

    Raises:
      ValueError: ``theta`` outside (0, 1].

    Example:
      >>> import jax.numpy as jnp, optax, sam_optax
      >>> tx = sam_optax.smooth_gradient(theta=0.5)
      >>> d, state = tx.update(jnp.array([1.0, 0.0]), tx.init(jnp.zeros(2)))
      >>> d, state = tx.update(jnp.array([0.0, 1.0]), state)
      >>> print(d)
      [0.25 0.5 ]
      >>> vasso = sam_optax.as_perturbation(optax.chain(tx, sam_optax.sam(rho=0.1)))

    References:
      Li and Giannakis, `Enhancing Sharpness-Aware Optimization Through Variance Suppression
      <https://arxiv.org/abs/2309.15639>`_, 2023.
    """
    hp.check("theta", theta, lower=0, upper=1, upper_allowed=True, lower_allowed=False)

    def init_fn(params: optax.Params) -> SmoothGradientState:
        return SmoothGradientState(trees.inexact_zeros(params), hp.init_schedules(theta))

    def update_fn(
        updates: optax.Updates,
        state: SmoothGradientState,
        params: optax.Params | None = None,
        *,
        training_step: chex.Numeric | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, SmoothGradientState]:
        del params, extra
        step = hp.step_of(state.schedule, training_step)
        ema = average(state.ema, updates, hp.evaluate(theta, step))
        d = trees.map_inexact(lambda g, m: trees.cast_like(jnp.asarray(m), g), updates, ema)
        return d, SmoothGradientState(ema, hp.advance(state.schedule, step))

    return Perturbation(init_fn, update_fn, state_type=SmoothGradientState)


def average(ema: optax.Updates, grads: optax.Updates, theta: chex.Numeric) -> optax.Updates:
    """(1 − θ) m + θ g in the dtypes of m; leaves without a gradient keep the old average."""

    def leaf(m: Leaf, g: Leaf) -> Leaf:
        if m is None or not trees.is_inexact(g):
            return m
        wide = trees.widen(m)
        share = jnp.asarray(theta).astype(wide.dtype)
        return trees.cast_like((1 - share) * wide + share * jnp.asarray(g).astype(wide.dtype), m)

    return jax.tree.map(leaf, ema, grads, is_leaf=trees.is_none)
