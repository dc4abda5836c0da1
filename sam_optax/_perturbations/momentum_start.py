"""Momentum-SAM: ascent along past gradients, at one gradient per step."""

from typing import Any, NamedTuple

import chex
import jax.numpy as jnp
import optax
from optax import OptState, Params, Updates

from sam_optax._internal import averages, trees
from sam_optax._internal import hyperparameters as hp
from sam_optax._internal.base_momentum import base_momentum
from sam_optax._internal.types import ExtraArgs
from sam_optax._perturbations.perturbation import Perturbation, as_perturbation


class MomentumStartState(NamedTuple):
    """State of :func:`sam_optax.momentum_start`.

    Attributes:
      ema: with ``decay``, m, the average of past gradients, with the structure, shapes and dtypes
        of the params and ``None`` in place of non-float leaves; else ``optax.EmptyState``.
      inner_state: state of the perturbation that maps m to ε.
    """

    ema: Updates
    inner_state: OptState


def momentum_start(
    perturbation: optax.GradientTransformation, decay: hp.Hyperparameter | None = None
) -> Perturbation:
    r"""Perturbs along the momentum of past gradients, at one gradient per step.

    .. math::
        \varepsilon_t = \mathrm{perturbation}(m_{t-1}), \qquad
        \hat g_t = \nabla L(w_t + \varepsilon_t).

    The gradient at the perturbed point is the only one that a step evaluates. m is the momentum in
    the state of the base optimizer: ``trace`` of ``optax.sgd`` with momentum, ``mu`` of
    ``optax.adam`` and its kind. It costs no memory, and contains what the base optimizer adds to
    the gradient, such as coupled weight decay. It is 0 before the first step, in which only the
    base optimizer runs.

    * ``momentum_start(optax.chain(sam(rho), optax.scale(-1.0)))`` is Momentum-SAM (Becker et al.),
      which perturbs by −ρ m/‖m‖, ahead of where the momentum is about to lead.
    * ``momentum_start(sam(rho))`` ascends along the momentum.
    * ``momentum_start(sam(rho), decay=0.0)`` ascends along the last step's gradient.

    With ``decay`` the perturbation keeps an average of its own, for base optimizers without
    momentum,

    .. math::
        m_t = \beta\, m_{t-1} + (1 - \beta)\, \hat g_t, \qquad m_0 = 0,

    which contains the gradients of the steps that perturb, and no weight decay.

    ``update`` does not use ``grads``: pass ``None``. In a hand-written loop, pass the state of the
    base optimizer: ``start_fn(params, state, base_state=opt_state)`` and ``perturb_fn(params,
    grads, state, base_state=opt_state)``, both before the base optimizer's update.

    Args:
      perturbation: maps m to ε, such as :func:`sam` or :func:`asam`.
      decay: β, 0 ≤ β < 1, or an optax schedule of it. Default ``None``: the base optimizer's
        momentum.

    Returns:
      A :class:`~sam_optax.Perturbation` with a ``start_fn`` that is the perturbed point. Its state
      is that of ``perturbation``, and with ``decay`` one copy of the gradient. Wrapping it in
      ``optax.chain`` would lose the start and raises an error.

    Raises:
      ValueError: ``decay`` out of range, or ``perturbation`` has a start already; in a step,
        without ``decay``, the state of the base optimizer is missing, or has no momentum or
        several.

    Example:
      >>> import jax, jax.numpy as jnp, optax, sam_optax
      >>> tx = sam_optax.sharpness_aware(
      ...     optax.sgd(0.1, momentum=0.5), sam_optax.momentum_start(sam_optax.sam(rho=1.0)))
      >>> x = jnp.array(3.0)
      >>> state = tx.init(x)
      >>> for _ in range(2):
      ...     updates, state = tx.update(None, state, x, grad_fn=jax.grad(lambda x: x**2))
      ...     print(f"{updates:.2f}")  # 2 · 3, then 2 · (3 + 1) + 0.5 · 6
      -0.60
      -1.10

    References:
      Becker et al., `Momentum-SAM: Sharpness Aware Minimization without Computational Overhead
      <https://arxiv.org/abs/2401.12033>`_, 2024.
    """
    if decay is not None:
        hp.check("decay", decay, lower=0, upper=1)
    inner = as_perturbation(perturbation)
    if inner.has_start:
        raise ValueError(
            "perturbation already has a start (random_start, low_pass, momentum_start): use only "
            "one of them."
        )

    def init_fn(params: Params) -> MomentumStartState:
        ema = optax.EmptyState() if decay is None else trees.inexact_zeros(params)
        return MomentumStartState(ema, inner.init(params))

    def displacement(
        params: Params, state: MomentumStartState, extra: ExtraArgs
    ) -> tuple[Updates, OptState]:
        m = base_momentum(extra["base_state"], params) if decay is None else state.ema
        return inner.update(m, state.inner_state, params, **{**extra, "ascent_grads": m})

    def start_fn(params: Params, state: MomentumStartState, **extra: Any) -> Params:
        return trees.add(params, displacement(params, state, extra)[0])

    def update_fn(
        updates: Updates,
        state: MomentumStartState,
        params: Params,
        *,
        decay: chex.Numeric | None,
        **extra: Any,
    ) -> tuple[Updates, MomentumStartState]:
        eps, inner_state = displacement(params, state, extra)
        eps = trees.map_inexact(
            lambda g, e: trees.zeros_like(g) if e is None else trees.cast_like(e, g), updates, eps
        )
        ema = state.ema
        if decay is not None:
            ema = averages.ema(
                ema, updates, averages.weights(decay, jnp.zeros((), jnp.int32), "zero")
            )
        return eps, MomentumStartState(ema, inner_state)

    return Perturbation(
        init_fn,
        update_fn,
        start_fn,
        hyperparameters={"decay": decay},
        single_pass=True,
        state_type=MomentumStartState,
    )
