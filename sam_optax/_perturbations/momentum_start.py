"""Momentum-SAM: ascent along past gradients, at one gradient per step."""

from typing import Any, NamedTuple

import optax
from chex import Numeric
from optax import OptState, Params, Updates

from sam_optax._internal import averages, trees
from sam_optax._internal import hyperparameters as hp
from sam_optax._internal.base_momentum import base_momentum
from sam_optax._internal.types import ExtraArgs, Leaf
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

    m is the momentum in the state of the base optimizer: ``trace`` of ``optax.sgd`` with momentum,
    ``mu`` of ``optax.adam`` and its kind. It contains what the base optimizer adds to the gradient,
    such as coupled weight decay. In the first step, with m = 0, only the base optimizer runs.

    ``momentum_start(sam(rho))`` ascends along the momentum. Momentum-SAM (Becker et al.),
    ``momentum_start(optax.chain(sam(rho), optax.scale(-1.0)))``, perturbs by −ρ m/‖m‖, ahead of
    where the momentum is about to lead.

    With ``decay``, for base optimizers without momentum, the perturbation keeps its own average,
    m_t = β m_{t−1} + (1 − β) ĝ_t with m₀ = 0, over the steps that perturb and without weight decay.
    With β = 0 it ascends along the last step's gradient.

    Args:
      perturbation: maps m to ε, such as :func:`sam` or :func:`asam`.
      decay: β, 0 ≤ β < 1, or a schedule. Default ``None``: the base optimizer's momentum.

    Returns:
      A :class:`~sam_optax.Perturbation` with a ``start_fn`` that is the perturbed point, which
      ``optax.chain`` around it would lose (an error). ``update`` does not use ``grads``: pass
      ``None``. Its state has one copy of the gradient with ``decay``. In a hand-written loop, pass
      ``base_state=opt_state`` to ``start_fn`` and ``perturb_fn``, before ``opt_state`` is updated.

    Raises:
      ValueError: ``decay`` out of range, or ``perturbation`` has a start; in a step without
        ``decay``, the state of the base optimizer is missing or has not exactly one momentum.

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
            "perturbation already has a start (random_start, low_pass, momentum_start): use one."
        )

    def init_fn(params: Params) -> MomentumStartState:
        ema = optax.EmptyState() if decay is None else trees.inexact_zeros(params)
        return MomentumStartState(ema, inner.init(params))

    def displacement(
        params: Params, state: MomentumStartState, extra: ExtraArgs
    ) -> tuple[Updates, OptState]:
        m = base_momentum(extra["base_state"], params) if decay is None else state.ema
        return inner.update(m, state.inner_state, params, **{**extra, "ascent_grads": m})

    def start_fn(params: Params, state: OptState, decay: Numeric | None, **extra: Any) -> Params:
        return trees.add(params, displacement(params, state, extra)[0])

    def update_fn(
        updates: Updates, state: OptState, params: Params, decay: Numeric | None, **extra: Any
    ) -> tuple[Updates, MomentumStartState]:
        if updates is None and decay is not None:
            raise ValueError("momentum_start with decay averages the gradients: pass grads.")

        def like_gradient(g: Leaf, e: Leaf) -> Leaf:
            return trees.zeros_like(g) if e is None else trees.cast_like(e, g)

        eps, inner_state = displacement(params, state, extra)
        ema = state.ema
        if decay is not None:
            ema = averages.ema(ema, updates, decay)
        eps = trees.map_inexact(like_gradient, params if updates is None else updates, eps)
        return eps, MomentumStartState(ema, inner_state)

    return Perturbation(
        init_fn,
        update_fn,
        start_fn,
        hyperparameters={"decay": decay},
        single_pass=True,
        state_type=MomentumStartState,
    )
