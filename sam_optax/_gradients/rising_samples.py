"""ESAM's selection of examples for the sharp gradient."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from optax import Params, Updates

from sam_optax._gradients.examples import LossesFn, gradient, losses_of, sizes
from sam_optax._internal.types import PyTree


def rising_samples(
    losses_fn: LossesFn, params: Params, batch: PyTree, fraction: float = 0.5
) -> Callable[[Params], Updates]:
    r"""ESAM: takes the sharp gradient only on the examples whose loss rises most.

    .. math::
        \frac{1}{|B^+|} \sum_{i \in B^+} \nabla \ell_i(w + \varepsilon), \qquad
        B^+ = \text{the } \lceil \gamma |B| \rfloor \text{ largest }
        \ell_i(w + \varepsilon) - \ell_i(w).

    The sharp pass costs a forward pass over the batch and a gradient on part of it. The ascent
    gradient is that of the whole batch: pass it as ``grads`` or by ``ascent_grad_fn``, since at w
    itself no loss has risen. The other half of ESAM is :func:`random_mask`.

    Args:
      losses_fn: ``(params, batch) -> losses``, of shape (batch,).
      params: w, the reference point of the rises.
      batch: a pytree of arrays whose first axis indexes the examples.
      fraction: γ in (0, 1], the share of examples to select. Default 0.5, the paper's.

    Returns:
      ``params -> grads``, for ``update(..., grad_fn=...)``.

    Raises:
      ValueError: ``fraction`` out of range, or the leaves differ in their number of examples.

    Example:
      >>> import jax, jax.numpy as jnp, sam_optax
      >>> losses_fn = lambda w, x: 0.5 * x * w**2
      >>> grad_fn = sam_optax.rising_samples(losses_fn, jnp.array(1.0), jnp.array([1.0, 3.0]))
      >>> print(grad_fn(jnp.array(2.0)))  # the loss of the second example rises most
      6.0

    References:
      Du et al., `Efficient Sharpness-Aware Minimization for Improved Training of Neural Networks
      <https://arxiv.org/abs/2110.03141>`_, 2022.
    """
    n, kept = sizes(batch, fraction)
    before = losses_of(losses_fn, params, batch, n)

    def grad_fn(point: Params) -> Updates:
        rises = jax.lax.stop_gradient(losses_of(losses_fn, point, batch, n) - before)
        _, index = jax.lax.top_k(rises, kept)
        risen = jax.tree.map(lambda leaf: jnp.asarray(leaf)[index], batch)
        return gradient(lambda p: jnp.mean(losses_fn(p, risen)), point)

    return grad_fn
