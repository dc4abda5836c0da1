"""The gradients of one perturbing step: the algorithm itself.

``parts`` averages them over devices, groups of the batch and samples of a start.
"""

from typing import NamedTuple

import jax
from optax import OptState, Params, Updates

from sam_optax._combinators import step_info
from sam_optax._combinators.gradient_functions import Evaluations, Pass
from sam_optax._combinators.options import Options
from sam_optax._internal import control_flow, trees
from sam_optax._internal.types import ExtraArgs, LossAndAux
from sam_optax._perturbations.perturbation import perturbed_params


class Gradients(NamedTuple):
    """The gradients evaluated in one step.

    Attributes:
      value: loss and aux of the first pass on the whole batch, or ``None``.
      ascent: g, the first ascent gradient.
      sharp: g_s, the gradient at the perturbed params; g in a step that does not perturb.
      perturbation_state: new state of the perturbation.
      climb: the diagnostics for ``info=True``, else ``None``.
    """

    value: LossAndAux | None
    ascent: Updates
    sharp: Updates
    perturbation_state: OptState
    climb: step_info.Climb | None


def perturbed_gradient(
    options: Options,
    loss: Evaluations,
    first: Pass | None,
    state: OptState,
    params: Params,
    extra: ExtraArgs,
) -> Gradients:
    """Evaluates the ascent gradient g and the sharp gradient g_s.

    g   = ∇L(start(w))           (start(w) = w for most methods; ``first``, if known)
    w̃   = w + perturbation(g)    (again from w̃, for each further ascent step)
    g_s = ∇L(w̃)                 (g itself, where the start is w̃)
    """
    method, dtype = options.method, options.perturb_dtype

    def start(point: Params, state: OptState) -> Params:
        if not method.has_start:
            return point
        if dtype is not None:
            # Cast first: in a narrow dtype, rounding may lose the start.
            point = trees.as_perturbed(point, dtype)
        return method.start_fn(point, state, **extra)

    def perturb(point: Params, state: OptState, grads: Updates) -> tuple[Params, OptState]:
        return perturbed_params(method, point, grads, state, dtype, extra)

    def ascend_again(reached: tuple[Params, OptState]) -> tuple[Params, OptState]:
        return perturb(*reached, loss.ascent(start(*reached)).grads)

    g = loss.ascent(start(params, state)) if first is None else first
    reached = perturb(params, state, g.grads)
    point, new_state = control_flow.repeat(int(options.ascent_steps) - 1, ascend_again, reached)
    g_s = g if method.single_pass else loss.sharp(point)

    climb = None
    if options.info:
        delta = start(params, state) if method.has_start else None
        losses = None if loss.ascent_given or method.has_start else _losses(g, g_s)
        climb = step_info.climb(params, delta, point, losses, options.norm_axis_name)
    value = g_s.value if loss.ascent_given else g.value
    ascent, sharp = g.grads, g_s.grads
    # A step that does not perturb, the other branch of the same lax.cond, has these dtypes.
    if dtype is not None:
        sharp = trees.map_inexact(trees.cast_like, sharp, params)
        ascent = trees.map_inexact(trees.cast_like, ascent, params) if first is None else ascent
    if loss.ascent_given:
        ascent = trees.map_inexact(trees.as_dtype_of, ascent, sharp)
    return Gradients(value, ascent, sharp, new_state, climb)


def _losses(g: Pass, g_s: Pass) -> tuple[jax.Array, jax.Array] | None:
    """L(w) and L(w̃), if the step has evaluated both."""
    if g.value is None or g_s.value is None:
        return None
    return g.value[0], g_s.value[0]
