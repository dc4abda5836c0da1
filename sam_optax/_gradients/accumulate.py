"""Gradients over microbatches."""

from collections.abc import Callable

from chex import Numeric
from optax import Params, Updates

from sam_optax._internal.control_flow import mean_of
from sam_optax._internal.hyperparameters import check_integer


def accumulate(
    grad_fn: Callable[[Params, Numeric], Updates], n: int
) -> Callable[[Params], Updates]:
    r"""Makes a gradient function that averages over n microbatches, evaluated sequentially.

    .. math::
        g(w) = \frac{1}{n} \sum_{i=0}^{n-1} \mathrm{grad\_fn}(w, i).

    Both passes of a step then cover the whole batch in the memory of one microbatch. This is not
    ``optax.MultiSteps`` around ``sharpness_aware``, whose second pass sees only the last
    microbatch. ``MultiSteps`` *inside*, as the base optimizer, averages n complete sharpness-aware
    gradients (m-sharpness over time), which is correct.

    Args:
      grad_fn: ``(params, i) -> grads``, the gradient on microbatch i (int32 scalar), a mean over
        its examples. Microbatches have the same size.
      n: number of microbatches, an integer ≥ 1.

    Returns:
      ``params -> grads``, for ``update(..., grad_fn=...)``. Sums are taken in float32 or wider.

    Raises:
      ValueError: ``n`` < 1.

    Example:
      >>> import jax, jax.numpy as jnp, sam_optax
      >>> a = jnp.array([1.0, 3.0])
      >>> grad_fn = sam_optax.accumulate(jax.grad(lambda w, i: 0.5 * a[i] * w**2), 2)
      >>> print(grad_fn(jnp.array(1.0)))
      2.0
    """
    check_integer("n", n, lower=1)
    return lambda params: mean_of(lambda i: grad_fn(params, i), n, params)
