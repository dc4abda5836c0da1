"""F-SAM: ascent along the mini-batch gradient without its full-gradient component."""

import optax
from jax.typing import DTypeLike

from sam_optax._internal import hyperparameters as hp
from sam_optax._internal.averages import EmaStart
from sam_optax._perturbations.perturbation import Perturbation, composed
from sam_optax._perturbations.remove_full_gradient import (
    FullGradientState,
    Subtract,
    remove_full_gradient,
)
from sam_optax._perturbations.sam import sam


def fsam(
    rho: hp.Hyperparameter = 0.1,
    sigma: hp.Hyperparameter = 1.0,
    lmbda: hp.Hyperparameter = 0.9,
    *,
    ema_start: EmaStart = "first_gradient",
    subtract: Subtract = "previous",
    accumulator_dtype: DTypeLike | None = None,
) -> Perturbation:
    r"""Friendly SAM: perturbs along the part of the gradient that is specific to the mini-batch.

    .. math::
        \varepsilon_t = \rho\, d_t / \|d_t\|_2, \qquad d_t = g_t - \sigma\, m_{t-1},
        \qquad m_t = \lambda\, m_{t-1} + (1 - \lambda)\, g_t.

    It is ``as_perturbation(optax.chain(remove_full_gradient(sigma, lmbda), sam(rho)))``. The first
    step is a SAM step. ε = 0 if d = 0. With :func:`asam` in place of ``sam`` it is equation (51) of
    the F-SAM paper's supplement.

    Args:
      rho: radius ρ ≥ 0. Default 0.1, the paper's for CIFAR-10 (0.2 for CIFAR-100, 0.075 for
        fine-tuning).
      sigma: share σ ≥ 0 of the full gradient that is removed. Default 1, the paper's. 0 is SAM.
      lmbda: decay 0 ≤ λ < 1 of the average m, which estimates the full gradient. Default 0.9; the
        public code's settings for CIFAR are between 0.6 and 0.95.
      ema_start: ``"first_gradient"`` (default, the public code), m₁ = g₁ and nothing is subtracted
        at first; ``"bias_corrected"``, the weights of the paper's theorem 1; or ``"zero"``.
      subtract: ``"previous"`` (default, the public code), m_{t−1}; or ``"new"``, m_t, which
        contains g_t: with it choose ``ema_start="zero"``, as otherwise d₁ = (1 − σ) g₁.
      accumulator_dtype: dtype of m. Default: each leaf's own. Use float32 for bfloat16 gradients
        and λ > 0.99.

    Returns:
      A :class:`~sam_optax.Perturbation` whose state holds one copy of the gradient.

    Raises:
      ValueError: a hyperparameter out of range, or an unknown option.

    Example:
      >>> import optax, sam_optax
      >>> tx = sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.fsam(rho=0.1))

    References:
      Li et al., `Friendly Sharpness-Aware Minimization <https://arxiv.org/abs/2403.12350>`_,
      2024.
    """
    first = remove_full_gradient(
        sigma, lmbda, ema_start=ema_start, subtract=subtract, accumulator_dtype=accumulator_dtype
    )
    types = hp.state_type(FullGradientState, sigma, lmbda), hp.state_type(optax.EmptyState, rho)
    return composed(optax.chain(first, sam(rho)), types)
