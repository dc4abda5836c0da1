"""The ASAM paper's toy example: how SAM and ASAM move in a valley of two weights."""

from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp
import optax
from jax import lax

import sam_optax
from sam_optax._internal import hyperparameters as hp

PAPER_STARTS = ((0.2, 0.05), (0.3, 0.033))
"""Initial weights of figure 3 of the ASAM paper."""


def toy_loss(w: chex.Array) -> jax.Array:
    """The ASAM paper's toy loss ``|w₁ ReLU(w₂) − 0.04|``, minimal in the valley w₁w₂ = 0.04.

    Args:
      w: (2,) weights.

    Returns:
      A scalar.

    Example:
      >>> import jax.numpy as jnp
      >>> from sam_optax import analysis
      >>> print(f"{analysis.toy_loss(jnp.array([0.2, 0.05])):.3f}")
      0.030

    References:
      Kwon et al., `ASAM: Adaptive Sharpness-Aware Minimization for Scale-Invariant Learning of
      Deep Neural Networks <https://arxiv.org/abs/2102.11600>`_, 2021, section 5.1.
    """
    return jnp.abs(w[0] * jax.nn.relu(w[1]) - 0.04)


def toy_trajectory(
    perturbation: optax.GradientTransformation,
    start: Sequence[float] = PAPER_STARTS[0],
    *,
    learning_rate: float = 0.01,
    steps: int = 1000,
) -> jax.Array:
    """The trajectory of SGD with a perturbation on :func:`toy_loss`.

    With ρ = 0.05, SAM reaches (0.2, 0.2) from the paper's first start, and does not move from the
    second, where its ascent step ends at w₂ < 0, in the flat part. With η = 0, ASAM reaches the
    valley from both for every ρ < √2, close to where it started. (With η = 0.01 the first start
    needs ρ < 1.11, the second ρ < 0.98.) ASAM ends close to its start only for a limited number of
    steps: where the gradient jumps, steps of constant length keep crossing the valley and drift
    along it, also towards (0.2, 0.2), more slowly for smaller learning rates.

    Args:
      perturbation: any perturbation, such as ``sam_optax.sam(rho=0.05)`` or
        ``sam_optax.asam(rho=0.5)``.
      start: (2,) initial weights. Default (0.2, 0.05); the other start of the paper is (0.3,
        0.033).
      learning_rate: learning rate of SGD, > 0. Default 0.01; the paper does not give its value.
      steps: number of steps, an integer ≥ 1. Default 1000.

    Returns:
      (steps + 1, 2) float32 weights, the start first.

    Raises:
      ValueError: an argument out of range.

    Example:
      >>> import sam_optax
      >>> from sam_optax import analysis
      >>> for method in (sam_optax.sam(0.05), sam_optax.asam(0.5)):
      ...     path = analysis.toy_trajectory(method, (0.3, 0.033))
      ...     print(f"{analysis.toy_loss(path[0]):.2f} to {analysis.toy_loss(path[-1]):.2f}")
      0.03 to 0.03
      0.03 to 0.00

    References:
      See :func:`toy_loss`.
    """
    hp.check("learning_rate", learning_rate, lower=0, schedule=False)
    hp.check_integer("steps", steps, lower=1)
    tx = sam_optax.sharpness_aware(optax.sgd(learning_rate), perturbation)
    w = jnp.asarray(start, jnp.float32)

    def step(carry: tuple[jax.Array, optax.OptState], _: None) -> tuple[tuple, jax.Array]:
        w, state = carry
        updates, state = tx.update(None, state, w, grad_fn=jax.grad(toy_loss))
        w = optax.apply_updates(w, updates)
        return (w, state), w

    _, path = lax.scan(step, (w, tx.init(w)), length=steps)
    return jnp.concatenate([w[None], path])
