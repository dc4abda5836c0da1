"""AE-SAM: a step perturbs if its gradient is large compared with previous gradients."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from chex import Array, Numeric

from sam_optax._internal import hyperparameters as hp
from sam_optax._schedules.when import GradNormWhen


class AboveAverageState(NamedTuple):
    """State of :func:`sam_optax.above_average`, as ``when_state`` of the optimizer.

    Attributes:
      mean: μ, float32 scalar: moving average of ‖g‖².
      variance: σ², float32 scalar: moving average of (‖g‖² − μ)².
    """

    mean: Array
    variance: Array


def above_average(c: hp.Hyperparameter, decay: float = 0.9) -> GradNormWhen:
    r"""AE-SAM: perturbs only when the gradient is longer than usual.

    .. math::
        \|g_t\|^2 \ge \mu_t + c_t\, \sigma_t, \qquad
        \mu_t = \delta\, \mu_{t-1} + (1 - \delta)\, \|g_t\|^2, \qquad
        \sigma_t^2 = \delta\, \sigma_{t-1}^2 + (1 - \delta)\, (\|g_t\|^2 - \mu_t)^2,

    with μ and σ² starting from 0, so that the first steps perturb (the paper's public description
    does not specify the start). The decision uses the gradient at w, which every step evaluates; a
    step that perturbs costs one more. A c that falls during training,
    ``optax.linear_schedule(lambda_2, lambda_1, steps)`` as in the paper, uses most of the ascents
    at the end. ‖g‖² is averaged over ``axis_name``, so that all devices decide alike, and spans
    the shards of the params along ``norm_axis_name``.

    Args:
      c: threshold in standard deviations, or an optax schedule of it. −∞ perturbs every step.
      decay: δ, 0 ≤ δ < 1. Default 0.9, this library's choice.

    Returns:
      A value for ``sharpness_aware(..., when=...)``. ``alternating``, perturbations with a start,
      ``groups`` and ``ascent_grad_fn`` do not support it: they evaluate no gradient at w first.

    Raises:
      ValueError: ``decay`` out of range.

    Example:
      >>> import optax, sam_optax
      >>> tx = sam_optax.sharpness_aware(
      ...     optax.sgd(0.1), sam_optax.sam(),
      ...     when=sam_optax.above_average(optax.linear_schedule(1.0, -1.0, 1000)))

    References:
      Jiang et al., `An Adaptive Policy to Employ Sharpness-Aware Minimization
      <https://arxiv.org/abs/2304.14647>`_, 2023.
    """
    hp.check("c", c, lower=-jnp.inf)
    hp.check_number("decay", decay, lower=0, upper=1)

    def init() -> AboveAverageState:
        return AboveAverageState(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))

    def decide(
        training_step: Array, state: AboveAverageState, square: jax.Array
    ) -> tuple[Numeric, AboveAverageState]:
        square = square.astype(jnp.float32)
        mean = decay * state.mean + (1 - decay) * square
        variance = decay * state.variance + (1 - decay) * jnp.square(square - mean)
        threshold = jnp.asarray(hp.evaluate(c, training_step)).astype(jnp.float32)
        large = square >= mean + threshold * jnp.sqrt(variance)
        return large, AboveAverageState(mean, variance)

    return GradNormWhen(init, decide)
