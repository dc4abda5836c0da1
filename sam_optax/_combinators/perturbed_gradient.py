"""The gradients of one perturbing step: the algorithm itself.

Other modules handle the rest of a step: devices, groups of the batch, samples of a start and steps
that do not perturb in ``parts``, diagnostics in ``step_info``, skipped steps in
``sharpness_aware``.
"""

import dataclasses
from typing import NamedTuple

import jax
from jax.typing import DTypeLike
from optax import OptState, Params, Updates

from sam_optax._combinators import step_info
from sam_optax._combinators.branch_dtypes import in_dtypes_of_plain_step
from sam_optax._combinators.gradient_functions import Evaluations, Pass
from sam_optax._internal import control_flow, trees
from sam_optax._internal.types import ExtraArgs, LossAndAux
from sam_optax._perturbations.perturbation import Perturbation, perturbed_params


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerturbedGradient:
    """How a step perturbs; the attributes are arguments of :func:`sharpness_aware`."""

    method: Perturbation
    ascent_steps: int
    perturb_dtype: DTypeLike | None
    info: bool

    def __call__(
        self,
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
        g = loss.ascent(self._start(params, state, extra)) if first is None else first

        def ascend_again(reached: tuple[Params, OptState]) -> tuple[Params, OptState]:
            grads = loss.ascent(self._start(*reached, extra)).grads
            return self._perturb(*reached, grads, extra)

        point, new_state = control_flow.repeat(
            self.ascent_steps - 1, ascend_again, self._perturb(params, state, g.grads, extra)
        )
        g_s = g if self.method.single_pass else loss.sharp(point)

        climb = None
        if self.info:
            start = self._start(params, state, extra) if self.method.has_start else None
            losses = self._losses(loss, g, g_s)
            climb = step_info.climb(params, start, point, losses, extra["norm_axis_name"])
        value = g_s.value if loss.ascent_given else g.value
        ascent, sharp = in_dtypes_of_plain_step(
            g.grads,
            g_s.grads,
            params,
            self.perturb_dtype,
            at_params=first is not None,
            ascent_given=loss.ascent_given,
        )
        return Gradients(value, ascent, sharp, new_state, climb)

    def evaluates_once(self, given: bool) -> bool:
        """Whether a step evaluates only one gradient; ``given``: the one at the params is known."""
        if self.method.single_pass:
            return self.method.samples == 1
        return given and self.ascent_steps == 1 and not self.method.has_start

    def _start(self, point: Params, state: OptState, extra: ExtraArgs) -> Params:
        """The params at which the ascent gradient is evaluated."""
        if not self.method.has_start:
            return point
        if self.perturb_dtype is not None:
            # Cast first: in a narrow dtype, rounding may lose the start.
            point = trees.as_perturbed(point, self.perturb_dtype)
        return self.method.start_fn(point, state, **extra)

    def _perturb(
        self, point: Params, state: OptState, grads: Updates, extra: ExtraArgs
    ) -> tuple[Params, OptState]:
        """``point + ε`` and the new state of the perturbation."""
        return perturbed_params(self.method, point, grads, state, self.perturb_dtype, extra)

    def _losses(self, loss: Evaluations, g: Pass, g_s: Pass) -> tuple[jax.Array, jax.Array] | None:
        """L(w) and L(w̃), if the step has evaluated both."""
        if loss.ascent_given or self.method.has_start or g.value is None or g_s.value is None:
            return None
        return g.value[0], g_s.value[0]
