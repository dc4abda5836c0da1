"""δ-SAM: weights the examples in the ascent gradient."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from chex import Array
from optax import Params, Updates

from sam_optax._gradients.examples import LossesFn, gradient
from sam_optax._internal import hyperparameters as hp
from sam_optax._internal import noise, trees
from sam_optax._internal.types import PyTree


def reweighted_ascent(
    losses_fn: LossesFn, batch: PyTree, *, key: noise.Key, power: float = 1.0
) -> Callable[[Params], Updates]:
    r"""δ-SAM: an ascent gradient that approximates a separate perturbation for each example.

    .. math::
        \sum_i \omega_i\, \nabla \ell_i(w), \qquad
        \omega_i \propto |\langle \nabla \ell_i(w), u \rangle|^k, \qquad u \sim N(0, I).

    A separate perturbation would raise the loss of example i by ρ‖∇ℓ_i‖. The first gradient step
    towards the common ε whose rises ⟨∇ℓ_i, ε⟩ are closest to these, in the least-squares sense, is
    along Σ ‖∇ℓ_i‖ ∇ℓ_i: each example is weighted by the norm of its gradient. It is estimated by
    the derivative along a random direction, which costs two forward passes. We could not obtain
    the paper and followed its public description; its weights may differ in detail.

    Args:
      losses_fn: ``(params, batch) -> losses``, of shape (batch,).
      batch: the second argument of ``losses_fn``.
      key: a JAX PRNG key, typed or raw, or an integer seed; pass a new one at each step.
      power: k. Default 1, as derived above; 0 is the plain gradient.

    Returns:
      ``params -> grads``, for ``update(..., ascent_grad_fn=...)``.

    Raises:
      TypeError: ``key`` is neither a seed nor a single PRNG key.
      ValueError: ``power`` < 0; (on a call) ``losses_fn`` does not return one loss per example.

    Example:
      >>> import jax, jax.numpy as jnp, sam_optax
      >>> grad_fn = sam_optax.reweighted_ascent(
      ...     lambda w, x: x * w, jnp.array([1.0, 3.0]), key=jax.random.key(0))
      >>> print(grad_fn(jnp.array(1.0)))  # (1 · 1 + 3 · 3) / (1 + 3)
      2.5

    References:
      Zhou et al., `Sharpness-Aware Minimization with Dynamic Reweighting
      <https://arxiv.org/abs/2112.08772>`_, 2022.
    """
    hp.check("power", power, lower=0, schedule=False)
    noise.check_key(key)

    def grad_fn(params: Params) -> Updates:
        words = noise.first_key(key)
        draw = noise.normal_tree(words, params, 1.0)
        direction = trees.map_inexact(lambda p, z: trees.cast_like(z, p), params, draw)

        def losses(inexact: Params) -> Array:
            return losses_fn(trees.merge(inexact, params), batch)

        w, u = trees.inexact_only(params), trees.inexact_only(direction)
        _, slopes = jax.jvp(losses, (w,), (u,))
        if jnp.ndim(slopes) != 1:
            raise ValueError(
                "losses_fn must return one loss for each example, shape (batch,), got shape "
                f"{jnp.shape(slopes)}: leave the mean out."
            )
        weights = jnp.abs(trees.widen(slopes)) ** power
        total = jnp.sum(weights)
        even = jnp.full_like(weights, 1 / weights.size)
        weights = jnp.where(total > 0, weights / jnp.where(total > 0, total, 1), even)
        weights = jax.lax.stop_gradient(weights).astype(slopes.dtype)
        return gradient(lambda p: jnp.sum(weights * losses_fn(p, batch)), params)

    return grad_fn
