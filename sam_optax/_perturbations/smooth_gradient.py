"""VaSSO's ascent direction: a moving average that suppresses mini-batch noise."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from chex import Array, Numeric
from optax import Params, Updates

from sam_optax._internal import averages, trees
from sam_optax._internal import hyperparameters as hp
from sam_optax._internal.averages import EmaStart
from sam_optax._perturbations.perturbation import Perturbation


class SmoothGradientState(NamedTuple):
    """State of :func:`sam_optax.smooth_gradient`.

    Attributes:
      count: int32 scalar, the number of gradients in the average.
      ema: d, in the structure, shapes and dtypes of the params; ``None`` for non-float leaves.
    """

    count: Array
    ema: Updates


def smooth_gradient(
    decay: hp.Hyperparameter = 0.6, *, ema_start: EmaStart = "first_gradient"
) -> Perturbation:
    r"""VaSSO: replaces the ascent gradient by an exponential moving average of ascent gradients.

    .. math::
        d_t = \beta\, d_{t-1} + (1 - \beta)\, g_t, \qquad d_1 = g_1.

    VaSSO is ``optax.chain(smooth_gradient(1 - theta), sam(rho))``, with ε = ρ d/‖d‖ and θ = 1 − β.
    The opposite, :func:`remove_full_gradient`, ascends along the noise that is averaged out here.

    Args:
      decay: β in [0, 1), the weight of the old average. Default 0.6; published: 0.1 to 0.8.
      ema_start: ``"first_gradient"`` (default, the public code); ``"zero"``, d₀ = 0; or
        ``"bias_corrected"``, that divided by the sum of its weights, the same for :func:`sam`.

    Returns:
      A :class:`~sam_optax.Perturbation` that maps g to d, in the dtypes of the gradient, for use
      in ``optax.chain``. Its state is one copy of the gradient and a count.

    Raises:
      ValueError: ``decay`` outside [0, 1), or an unknown ``ema_start``.

    Example:
      >>> import jax.numpy as jnp, sam_optax
      >>> tx = sam_optax.smooth_gradient(decay=0.5)
      >>> d, state = tx.update(jnp.array([1.0, 0.0]), tx.init(jnp.zeros(2)))
      >>> d, state = tx.update(jnp.array([0.0, 1.0]), state)
      >>> print(d)
      [0.5 0.5]

    References:
      Li and Giannakis, `Enhancing Sharpness-Aware Optimization Through Variance Suppression
      <https://arxiv.org/abs/2309.15639>`_, 2023.
    """
    hp.check("decay", decay, lower=0, upper=1)
    averages.check_ema_start(ema_start)

    def init_fn(params: Params) -> SmoothGradientState:
        return SmoothGradientState(jnp.zeros((), jnp.int32), trees.inexact_zeros(params))

    def update_fn(
        updates: Updates, state: SmoothGradientState, params: Params, decay: Numeric, **extra: Any
    ) -> tuple[Updates, SmoothGradientState]:
        ema = averages.ema(state.ema, updates, decay, state.count, ema_start)
        d = trees.map_inexact(lambda g, m: trees.cast_like(jnp.asarray(m), g), updates, ema)
        return d, SmoothGradientState(optax.safe_increment(state.count), ema)

    return Perturbation(
        init_fn, update_fn, hyperparameters={"decay": decay}, state_type=SmoothGradientState
    )
