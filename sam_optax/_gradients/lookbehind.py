"""Lookbehind-SAM: descent along the average gradient of several ascent steps."""

from collections.abc import Callable
from typing import TypeAlias

import jax.numpy as jnp
import optax

from sam_optax._gradients.stateless import displacement, require_stateless
from sam_optax._internal import control_flow, trees
from sam_optax._internal import hyperparameters as hp

Reached: TypeAlias = tuple[optax.Params, optax.Updates, optax.Updates]
"""A point, the gradient there, and the sum of the gradients so far."""

_ALTERNATIVE = "lookbehind ascends from the point that it receives, each time anew."


def lookbehind(
    grad_fn: Callable[[optax.Params], optax.Updates],
    perturbation: optax.GradientTransformation,
    k: int,
) -> Callable[[optax.Params], optax.Updates]:
    r"""Lookbehind-SAM: a gradient function that takes further ascent steps and averages gradients.

    .. math::
        \frac{1}{k} \sum_{i=1}^{k} \nabla L(w'_i), \qquad
        w'_1 = w + \varepsilon, \qquad
        w'_{i+1} = w'_i + \mathrm{perturbation}(\nabla L(w'_i)).

    Use it for the sharp gradient, with the plain ``grad_fn`` for the ascent: ``tx.update(None,
    state, params, grad_fn=lookbehind(grad_fn, sam(rho), k), ascent_grad_fn=grad_fn)``, where ``tx``
    is ``sharpness_aware(base, sam(rho))``. With SGD as the base optimizer and the learning rate α k
    η, this is Lookbehind-SAM with k inner steps, learning rate η and interpolation α. The paper
    evaluates 2k gradients; here each inner gradient is used for both ascent and descent, so a step
    takes k + 1.

    Args:
      grad_fn: ``params -> grads``, the gradient on the step's batch.
      perturbation: the perturbation of the step, with neither a start nor a state: :func:`sam`,
        :func:`asam`, :func:`fisher_sam`.
      k: number of gradients to average, an integer ≥ 1. 1 is SAM.

    Returns:
      ``params -> grads``, for ``update(..., grad_fn=...)``. Sums are taken in float32 or wider.

    Raises:
      TypeError: ``perturbation`` is not a gradient transformation.
      ValueError: ``k`` < 1, or ``perturbation`` has a start or a state.

    Example:
      >>> import jax, jax.numpy as jnp, sam_optax
      >>> grad_fn = sam_optax.lookbehind(jax.grad(lambda w: w**2), sam_optax.sam(rho=1.0), k=3)
      >>> print(grad_fn(jnp.array(2.0)))  # 2 · (2 + 3 + 4) / 3
      6.0

    References:
      Mordido et al., `Lookbehind-SAM: k steps back, 1 step forward
      <https://arxiv.org/abs/2307.16704>`_, 2024.
    """
    hp.check_integer("k", k, lower=1)
    require_stateless(perturbation, _ALTERNATIVE)

    def averaged(params: optax.Params) -> optax.Updates:
        def climb(reached: Reached) -> Reached:
            point, grads, total = reached
            point = trees.add(point, displacement(perturbation, grads, point, _ALTERNATIVE))
            grads = grad_fn(point)
            more = trees.map_inexact(lambda t, g: t + jnp.asarray(g).astype(t.dtype), total, grads)
            return point, grads, more

        grads = grad_fn(params)
        total = trees.map_inexact(trees.widen, grads)
        _, _, total = control_flow.repeat(k - 1, climb, (params, grads, total))
        return trees.map_inexact(lambda t, g: trees.cast_like(t / k, g), total, grads)

    return averaged
