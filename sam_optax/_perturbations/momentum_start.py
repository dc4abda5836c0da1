"""Momentum-SAM: ascent along past gradients, at one gradient per step."""

from typing import Any, NamedTuple

import chex
import optax

from sam_optax._internal import hyperparameters as hp
from sam_optax._internal import trees
from sam_optax._internal.types import ExtraArgs
from sam_optax._perturbations.perturbation import Perturbation, as_perturbation
from sam_optax._perturbations.smooth_gradient import average


class MomentumStartState(NamedTuple):
    """State of :func:`sam_optax.momentum_start`.

    Attributes:
      ema: m, the average of past gradients, with the structure, shapes and dtypes of the params;
        ``None`` in place of non-float leaves.
      inner_state: state of the perturbation that maps m to ε.
      schedule: :class:`~sam_optax.ScheduleState` if ``decay`` is a schedule, else
        ``optax.EmptyState``.
    """

    ema: optax.Updates
    inner_state: optax.OptState
    schedule: hp.ScheduleState | optax.EmptyState


def momentum_start(
    perturbation: optax.GradientTransformation, decay: hp.Hyperparameter = 0.9
) -> Perturbation:
    r"""Perturbs along an average of past gradients, at one gradient per step.

    .. math::
        \varepsilon_t = \mathrm{perturbation}(m_{t-1}), \qquad
        \hat g_t = \nabla L(w_t + \varepsilon_t), \qquad
        m_t = \beta\, m_{t-1} + (1 - \beta)\, \hat g_t.

    The gradient at the perturbed point is the only one that a step evaluates: it drives the base
    optimizer and enters the average along which the next step ascends. m₀ = 0, so in the first step
    only the base optimizer runs.

    * ``momentum_start(sam(rho), 0.9)`` ascends along the momentum of SGD with the same decay.
    * ``momentum_start(sam(rho), 0.0)`` ascends along the last step's gradient.
    * ``momentum_start(optax.chain(sam(rho), optax.scale(-1.0)), 0.9)`` is Momentum-SAM (Becker et
      al.), which perturbs by −ρ v/‖v‖, ahead of where the momentum is about to lead.

    ``update`` does not use ``grads``: pass ``None``. With ``when``, only the gradients of steps
    that perturb enter the average.

    Args:
      perturbation: maps the average to ε, such as :func:`sam` or :func:`asam`.
      decay: β, 0 ≤ β < 1. Default 0.9, the usual value for momentum.

    Returns:
      A :class:`~sam_optax.Perturbation` with a ``start_fn`` that is the perturbed point. Its state
      is one copy of the gradient and the state of ``perturbation``. Wrapping it in ``optax.chain``
      would lose the start and raises an error.

    Raises:
      ValueError: ``decay`` out of range, or ``perturbation`` has a start already.

    Example:
      >>> import jax, jax.numpy as jnp, optax, sam_optax
      >>> tx = sam_optax.sharpness_aware(
      ...     optax.sgd(0.1), sam_optax.momentum_start(sam_optax.sam(rho=1.0)))
      >>> x = jnp.array(3.0)
      >>> state = tx.init(x)
      >>> for _ in range(2):
      ...     updates, state = tx.update(None, state, x, grad_fn=jax.grad(lambda x: x**2))
      ...     print(f"{updates:.2f}")  # 2 · 3, then 2 · (3 + 1)
      -0.60
      -0.80

    References:
      Becker et al., `Momentum-SAM: Sharpness Aware Minimization without Computational Overhead
      <https://arxiv.org/abs/2401.12033>`_, 2024.
    """
    hp.check("decay", decay, lower=0, upper=1)
    inner = as_perturbation(perturbation)
    if inner.has_start:
        raise ValueError(
            "perturbation already has a start (random_start, low_pass, momentum_start): use only "
            "one of them."
        )

    def init_fn(params: optax.Params) -> MomentumStartState:
        return MomentumStartState(
            trees.inexact_zeros(params), inner.init(params), hp.init_schedules(decay)
        )

    def displacement(
        params: optax.Params, state: MomentumStartState, extra: ExtraArgs
    ) -> tuple[optax.Updates, optax.OptState]:
        return inner.update(
            state.ema, state.inner_state, params, **{**extra, "ascent_grads": state.ema}
        )

    def start_fn(params: optax.Params, state: MomentumStartState, **extra: Any) -> optax.Params:
        return trees.add(params, displacement(params, state, extra)[0])

    def update_fn(
        updates: optax.Updates,
        state: MomentumStartState,
        params: optax.Params | None = None,
        *,
        training_step: chex.Numeric | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, MomentumStartState]:
        step = hp.step_of(state.schedule, training_step)
        given = extra if training_step is None else {"training_step": training_step, **extra}
        eps, inner_state = displacement(params, state, given)
        share = 1 - trees.widen(hp.evaluate(decay, step))
        ema = average(state.ema, updates, share)
        eps = trees.map_inexact(
            lambda g, e: trees.zeros_like(g) if e is None else trees.cast_like(e, g), updates, eps
        )
        return eps, MomentumStartState(ema, inner_state, hp.advance(state.schedule, step))

    return Perturbation(
        init_fn, update_fn, start_fn, single_pass=True, state_type=MomentumStartState
    )
