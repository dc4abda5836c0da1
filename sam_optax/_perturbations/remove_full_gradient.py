"""Removes the full-gradient component of the ascent gradient."""

from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import optax
from chex import Array
from jax.typing import DTypeLike
from optax import Params, Updates

from sam_optax._internal import averages, trees
from sam_optax._internal import hyperparameters as hp
from sam_optax._internal.averages import EmaStart
from sam_optax._internal.types import Leaf
from sam_optax._perturbations.perturbation import Perturbation

Subtract = Literal["previous", "new"]


class FullGradientState(NamedTuple):
    """State of :func:`sam_optax.remove_full_gradient`.

    Attributes:
      count: int32 scalar, the number of gradients in the average.
      ema: m, in the structure, shapes and dtypes of the params (or in ``accumulator_dtype``).
    """

    count: Array
    ema: Updates


def remove_full_gradient(
    sigma: hp.Hyperparameter = 1.0,
    lmbda: hp.Hyperparameter = 0.9,
    *,
    ema_start: EmaStart = "first_gradient",
    subtract: Subtract = "previous",
    accumulator_dtype: DTypeLike | None = None,
) -> Perturbation:
    r"""Subtracts an estimate of the full gradient: an exponential moving average of past gradients.

    .. math::
        d_t = g_t - \sigma\, m_{t-1}, \qquad m_t = \lambda\, m_{t-1} + (1 - \lambda)\, g_t.

    d, specific to the batch, is the direction of ascent for a perturbation chained after it. With
    σ = 1 and an unbiased m, its expected inner product with the full gradient is 0 (lemma 1).

    Args:
      sigma: share σ ≥ 0 of the full gradient that is removed. Default 1, the paper's.
      lmbda: decay 0 ≤ λ < 1 of the average. Default 0.9; the public code: 0.6 to 0.95 for CIFAR.
      ema_start: ``"first_gradient"`` (default, the public code): the first step subtracts nothing,
        so it is plain SAM, and m₁ = g₁. ``"bias_corrected"``: weights w_t ∝ λ^(T−t) that sum to 1,
        as in theorem 1; with ``subtract="previous"`` only the weight of g₁ differs from the
        default. ``"zero"``: m₀ = 0 and no correction.
      subtract: ``"previous"`` (default, the public code), m_{t−1}; or ``"new"``, m_t.
      accumulator_dtype: dtype of m. Default: each leaf's. Use float32 for bfloat16 with λ > 0.99.

    Returns:
      A :class:`~sam_optax.Perturbation` that maps g to d, for use in ``optax.chain``, in its dtypes
      (for float16, whose range d may exceed, in float32). Its state is m and a count.

    Raises:
      ValueError: a hyperparameter out of range, or an unknown option.

    Example:
      >>> import jax.numpy as jnp, sam_optax
      >>> tx = sam_optax.remove_full_gradient(sigma=0.5, lmbda=0.9)
      >>> state = tx.init(jnp.zeros(2))
      >>> d, state = tx.update(jnp.array([1.0, 0.0]), state)
      >>> d, state = tx.update(jnp.array([0.0, 1.0]), state)
      >>> print(d)
      [-0.5  1. ]

    References:
      Li et al., `Friendly Sharpness-Aware Minimization <https://arxiv.org/abs/2403.12350>`_,
      2024.
    """
    hp.check("sigma", sigma, lower=0)
    hp.check("lmbda", lmbda, lower=0, upper=1)
    averages.check_ema_start(ema_start)
    accumulator_dtype = hp.check_float_dtype("accumulator_dtype", accumulator_dtype)
    if subtract not in ("previous", "new"):
        raise ValueError(f"subtract must be 'previous' or 'new', got {subtract!r}.")

    def init_fn(params: Params) -> FullGradientState:
        ema = trees.inexact_zeros(params, accumulator_dtype)
        return FullGradientState(jnp.zeros((), jnp.int32), ema)

    def update_fn(
        updates: Updates, state: FullGradientState, params: Params | None, **extra: Any
    ) -> tuple[Updates, FullGradientState]:
        sigma, lmbda = extra["sigma"], extra["lmbda"]
        how = (lmbda, state.count, ema_start)

        def residual(g: Leaf, m: Array) -> Array:
            wide = trees.widen(g)
            return wide - jnp.asarray(sigma).astype(wide.dtype) * jnp.asarray(m).astype(wide.dtype)

        if subtract == "new":
            ema = averages.ema(state.ema, updates, *how)
            d = trees.map_inexact(residual, updates, ema)
        else:
            # The average is computed from d, not from g = d + σm: the compiler then knows that the
            # old average is read before the new one overwrites it, and makes no copy.
            d = trees.map_inexact(residual, updates, state.ema)
            ema = averages.ema(state.ema, d, *how, removed=sigma)
        d = trees.map_inexact(trees.cast_if_range_allows, d, updates)
        return d, FullGradientState(optax.safe_increment(state.count), ema)

    values = {"sigma": sigma, "lmbda": lmbda}
    return Perturbation(init_fn, update_fn, hyperparameters=values, state_type=FullGradientState)
