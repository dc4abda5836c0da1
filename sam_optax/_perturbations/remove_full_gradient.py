"""Removes the full-gradient component of the ascent gradient."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from sam_optax._internal import hyperparameters as hp
from sam_optax._internal import trees
from sam_optax._internal.types import Function, Leaf
from sam_optax._perturbations.perturbation import Perturbation

EmaStart = Literal["first_gradient", "zero", "bias_corrected"]
Subtract = Literal["previous", "new"]


class FullGradientState(NamedTuple):
    """State of :func:`sam_optax.remove_full_gradient`.

    Attributes:
      count: int32 scalar, the number of gradients in the average.
      ema: m, the estimate of the full gradient, with the structure and shapes of the params, in the
        dtype of each leaf (or ``accumulator_dtype``).
      schedule: :class:`~sam_optax.ScheduleState` if a hyperparameter is a schedule, else
        ``optax.EmptyState``.
    """

    count: chex.Array
    ema: optax.Updates
    schedule: hp.ScheduleState | optax.EmptyState


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

    The result is the batch-specific residual. Chained before a perturbation, it sets the direction
    of ascent. With σ = 1 and an unbiased m, its expected inner product with the full gradient is 0
    (lemma 1).

    The paper's theorem and its public code weight the average differently; both are available:

    * ``ema_start="first_gradient"`` (default, the public code): the first step subtracts nothing,
      so it is plain SAM, and m₁ = g₁.
    * ``"bias_corrected"``: weights w_t ∝ λ^(T−t) that sum to 1, as in theorem 1; with
      ``subtract="previous"`` it differs from the default only in the weight of g₁.
    * ``"zero"``: m₀ = 0 and no correction.
    * ``subtract="previous"`` (default, the public code) uses m_{t−1}; ``"new"`` uses m_t, which
      contains the gradient itself.

    Args:
      sigma: share σ ≥ 0 of the full gradient that is removed. Default 1, the paper's.
      lmbda: decay 0 ≤ λ < 1 of the average. Default 0.9; the public code's settings for CIFAR are
        between 0.6 and 0.95.
      ema_start: see above.
      subtract: see above.
      accumulator_dtype: dtype of m. Default: each leaf's own. Use float32 for bfloat16 gradients
        and λ > 0.99.

    Returns:
      A :class:`~sam_optax.Perturbation` that maps g to d, in the dtypes of the gradient, for use
      in ``optax.chain``. Its state is one copy of the gradient and a count.

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
    return remove_cast(sigma, lmbda, ema_start, subtract, accumulator_dtype, trees.cast_like)


def remove_cast(
    sigma: hp.Hyperparameter,
    lmbda: hp.Hyperparameter,
    ema_start: EmaStart,
    subtract: Subtract,
    accumulator_dtype: DTypeLike | None,
    cast: Callable[[jax.Array, DTypeLike], jax.Array],
) -> Perturbation:
    """:func:`remove_full_gradient`; ``cast`` gives the result the dtype of the gradient."""
    hp.check("sigma", sigma, lower=0)
    hp.check("lmbda", lmbda, lower=0, upper=1)
    if ema_start not in ("first_gradient", "zero", "bias_corrected"):
        raise ValueError(
            f"ema_start must be 'first_gradient', 'zero' or 'bias_corrected', got {ema_start!r}."
        )
    accumulator_dtype = hp.check_float_dtype("accumulator_dtype", accumulator_dtype)
    if subtract not in ("previous", "new"):
        raise ValueError(f"subtract must be 'previous' or 'new', got {subtract!r}.")

    def init_fn(params: optax.Params) -> FullGradientState:
        ema = trees.inexact_zeros(params, accumulator_dtype)
        return FullGradientState(jnp.zeros((), jnp.int32), ema, hp.init_schedules(sigma, lmbda))

    def update_fn(
        updates: optax.Updates,
        state: FullGradientState,
        params: optax.Params | None = None,
        *,
        training_step: chex.Numeric | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, FullGradientState]:
        del params, extra
        step = hp.step_of(state.schedule, training_step)
        count = optax.safe_increment(state.count)
        decay = hp.evaluate(lmbda, step)
        sigma_t = hp.evaluate(sigma, step)
        gain = 1 - decay
        if ema_start == "bias_corrected":
            wide = jnp.result_type(float)  # float64 where that is enabled
            decay = jnp.asarray(decay).astype(wide)
            gain = (1 - decay) / (1 - decay ** count.astype(wide))

        def residual(g: Leaf, m: jax.Array) -> jax.Array:
            wide = trees.widen(g)
            share = jnp.asarray(sigma_t).astype(wide.dtype)
            return wide - share * jnp.asarray(m).astype(wide.dtype)

        def new_ema(x: jax.Array, m: jax.Array, share: chex.Numeric) -> jax.Array:
            """λm + (1 − λ)g, where g = x + ``share`` m."""
            old = trees.widen(m).astype(x.dtype)
            a, keep = jnp.asarray(gain).astype(x.dtype), jnp.asarray(decay).astype(x.dtype)
            if ema_start == "bias_corrected":
                keep = 1 - a
            if ema_start == "first_gradient":  # m is 0
                a = jnp.where(state.count == 0, jnp.ones_like(a), a)
            keep += a * jnp.asarray(share).astype(x.dtype)
            return trees.cast_like(keep * old + a * x, m)

        if subtract == "new":
            ema = _map_ema(lambda g, m: new_ema(trees.widen(g), m, 0), updates, state.ema)
            wide = trees.map_inexact(residual, updates, ema)
        else:
            # The average is computed from d, not from g: the compiler then knows that the old
            # average is read before the new one overwrites it, and makes no copy.
            wide = trees.map_inexact(residual, updates, state.ema)
            ema = _map_ema(lambda x, m: new_ema(x, m, sigma_t), wide, state.ema)
        d = trees.map_inexact(cast, wide, updates)
        return d, FullGradientState(count, ema, hp.advance(state.schedule, step))

    return Perturbation(init_fn, update_fn, state_type=FullGradientState)


def _map_ema(f: Function, updates: optax.Updates, ema: optax.Updates) -> optax.Updates:
    """The new average; leaves without a gradient keep the old one."""
    return jax.tree.map(
        lambda g, m: f(g, m) if trees.is_inexact(g) else m,
        updates,
        ema,
        is_leaf=trees.is_none,
    )
