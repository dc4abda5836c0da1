"""F-SAM: ascent along the mini-batch gradient without its full-gradient component."""

from typing import Any

import optax
from jax.typing import DTypeLike

from sam_optax._internal import hyperparameters as hp
from sam_optax._internal import trees
from sam_optax._perturbations.perturbation import Perturbation
from sam_optax._perturbations.remove_full_gradient import (
    EmaStart,
    FullGradientState,
    Subtract,
    remove_cast,
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

    It is :func:`remove_full_gradient` followed by :func:`sam`. The first step is a SAM step. ε = 0
    if d = 0. With :func:`asam` in place of ``sam``,
    ``as_perturbation(optax.chain(remove_full_gradient(), asam()))``, it is equation (51) of the
    supplement.

    Args:
      rho: radius ρ ≥ 0. Default 0.1, the paper's for CIFAR-10 (0.2 for CIFAR-100, 0.075 for
        fine-tuning).
      sigma: see :func:`remove_full_gradient`.
      lmbda: see :func:`remove_full_gradient`.
      ema_start: see :func:`remove_full_gradient`.
      subtract: see :func:`remove_full_gradient`.
      accumulator_dtype: see :func:`remove_full_gradient`.

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
    cast = trees.cast_if_range_allows
    inner = optax.chain(
        remove_cast(sigma, lmbda, ema_start, subtract, accumulator_dtype, cast), sam(rho)
    )

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        eps, state = inner.update(updates, state, params, **extra)
        return trees.map_inexact(trees.cast_like, eps, updates), state

    return Perturbation(
        inner.init, update_fn, state_type=(FullGradientState, hp.schedules_type(rho))
    )
