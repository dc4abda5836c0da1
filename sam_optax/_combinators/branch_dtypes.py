"""Equal dtypes for steps that perturb and steps that do not: the branches of one ``lax.cond``.

The caller's gradient may be wider or narrower than the result of ``grad_fn``. So may the gradient
from a separate ``ascent_grad_fn``, or at perturbed params of another dtype.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from optax import Params, Updates

from sam_optax._combinators.gradient_functions import Evaluation
from sam_optax._internal import control_flow, trees


def in_dtypes_of_sharp(
    grads: Updates,
    sharp: Evaluation,
    params: Params,
    perturb_dtype: DTypeLike | None,
    groups: int | None,
) -> Updates:
    """The gradient of a step that does not perturb, in the dtypes of the sharp gradient."""
    # Outside of jit the branches need not agree, and checking would trace at every step.
    known = perturb_dtype is not None or not control_flow.is_traced(params, grads)
    if known and trees.same_dtypes(grads, params):
        return grads
    like = params
    if perturb_dtype is None:
        group = [jnp.zeros((), jnp.int32)] if groups else []
        like = jax.eval_shape(sharp, params, *group).grads
    return trees.map_inexact(trees.as_dtype_of, grads, like)


def in_dtypes_of_plain_step(
    ascent: Updates,
    sharp: Updates,
    params: Params,
    perturb_dtype: DTypeLike | None,
    *,
    at_params: bool,
    ascent_given: bool,
) -> tuple[Updates, Updates]:
    """Both gradients of a step that perturbs, in the dtypes of a step that does not.

    Args:
      ascent: g.
      sharp: g_s.
      params: the params w.
      perturb_dtype: see :func:`sharpness_aware`.
      at_params: whether g was evaluated at w itself, in the dtypes of w.
      ascent_given: whether g comes from an ``ascent_grad_fn``.
    """
    if perturb_dtype is not None:
        sharp = trees.map_inexact(trees.cast_like, sharp, params)
        if not at_params:
            ascent = trees.map_inexact(trees.cast_like, ascent, params)
    if ascent_given:
        ascent = trees.map_inexact(trees.as_dtype_of, ascent, sharp)
    return ascent, sharp
