"""How much a perturbation raises the loss."""

import jax
import optax

from sam_optax import as_perturbation
from sam_optax.analysis._loss import LossLike, as_loss, native


def loss_rise(
    loss: LossLike,
    params: optax.Params,
    perturbation: optax.GradientTransformation,
    state: optax.OptState | None = None,
) -> jax.Array:
    r"""Measures how much a perturbation raises the loss: L(w + ε) − L(w).

    It is the one-step estimate of sharpness with any perturbation of this library or any optax
    transformation used as one: the rise that a training step sees, on the data of ``loss``.

    Args:
      loss: see :func:`sharpness`.
      params: see :func:`sharpness`.
      perturbation: any perturbation, such as :func:`sam_optax.fsam`; its ascent gradient is ∇L at
        its start.
      state: the perturbation's state, such as that of training. Default: a fresh one.

    Returns:
      A scalar in the unit of the loss. It can be negative.

    Raises:
      TypeError: ``loss`` is not callable, or ``perturbation`` is not a gradient transformation.

    Example:
      >>> import jax.numpy as jnp, sam_optax
      >>> from sam_optax import analysis
      >>> rise = analysis.loss_rise(lambda w: w**2, jnp.array(3.0), sam_optax.sam(rho=1.0))
      >>> print(f"{rise:.1f}")
      7.0
    """
    method = as_perturbation(perturbation)
    measured, params = as_loss(loss), native(params)
    state = method.init(params) if state is None else state
    _, grads = measured.value_and_grad(method.start_fn(params, state))
    perturbed, _ = method.perturb_fn(params, grads, state)
    return measured(perturbed) - measured(params)
