"""F-SAM: ascent along the mini-batch gradient without its full-gradient component."""

import optax
from jax.typing import DTypeLike

from sam_optax._internal import hyperparameters as hp
from sam_optax._internal.averages import EmaStart
from sam_optax._perturbations.perturbation import Perturbation, as_perturbation
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
        \varepsilon_t = \rho\, d_t / \|d_t\|_2, \quad d_t = g_t - \sigma\, m_{t-1}, \quad
        m_t = \lambda\, m_{t-1} + (1 - \lambda)\, g_t.

    It is ``optax.chain(remove_full_gradient(sigma, lmbda), sam(rho))``, and with :func:`asam` in
    place of ``sam`` equation (51) of the paper's supplement. By default the first step is SAM's.

    Args:
      rho: radius ρ ≥ 0. Default 0.1, the paper's for CIFAR-10 (CIFAR-100: 0.2, fine-tuning: 0.075).
      sigma: share σ ≥ 0 of the full gradient that is removed. Default 1, the paper's. 0 is SAM.
      lmbda: decay 0 ≤ λ < 1 of the average m. Default 0.9; the public code: 0.6 to 0.95 for CIFAR.
      ema_start: ``"first_gradient"`` (default), m₁ = g₁; ``"bias_corrected"``; or ``"zero"``.
      subtract: ``"previous"`` (default, the public code), m_{t−1}; or ``"new"``, m_t, which
        contains g_t: with it choose ``ema_start="zero"``, as otherwise d₁ = (1 − σ) g₁.
      accumulator_dtype: dtype of m; float32 for bfloat16 and λ > 0.99. Default: each leaf's own.

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
    return Perturbation(*as_perturbation(optax.chain(first, sam(rho))), state_type=types)
