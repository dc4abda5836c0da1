"""A radius that follows the learning rate."""

import jax
import jax.numpy as jnp
import optax
from chex import Numeric

from sam_optax._internal import hyperparameters as hp


def rho_from_learning_rate(
    schedule: optax.Schedule, rho_min: Numeric, rho_max: Numeric, lr_min: float, lr_max: float
) -> optax.Schedule:
    r"""Makes a schedule for the radius ρ that follows a learning-rate schedule linearly.

    .. math::
        \rho_t = \rho_{\min} + (\rho_{\max} - \rho_{\min})\,
        \frac{\eta_t - \eta_{\min}}{\eta_{\max} - \eta_{\min}},

    clamped to [ρ_min, ρ_max], so that a warm-up below ``lr_min`` has the radius ρ_min and not a
    negative one. If ``lr_min == lr_max``, the radius is ρ_max at and above that learning rate.

    Args:
      schedule: the learning rate, a function of the training step.
      rho_min: radius at the lowest learning rate, ≥ 0: a number or a JAX scalar (traced or not).
      rho_max: radius at the highest learning rate, ≥ ``rho_min``, likewise.
      lr_min: lowest learning rate, ≥ 0.
      lr_max: highest learning rate, ≥ ``lr_min``.

    Returns:
      A schedule for ``rho`` of any perturbation.

    Raises:
      TypeError: ``schedule`` is not a function.
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
    hp.check("rho_min", rho_min, lower=0, schedule=False)
    lowest = 0 if isinstance(rho_min, jax.core.Tracer) else rho_min
    hp.check("rho_max", rho_max, lower=float(lowest), schedule=False)
    hp.check_number("lr_min", lr_min, lower=0)
    hp.check_number("lr_max", lr_max, lower=lr_min)

    def rho(step: Numeric) -> Numeric:
        lr = jnp.asarray(schedule(step))
        share = (lr >= lr_max).astype(lr.dtype)
        if lr_max > lr_min:
            share = jnp.clip((lr - lr_min) / (lr_max - lr_min), 0, 1)
        return rho_min + (rho_max - rho_min) * share

    return rho
