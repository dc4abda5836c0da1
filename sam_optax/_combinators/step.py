"""The passes of one step: from the ascent gradient to the gradient at the perturbed params."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import optax

from sam_optax._combinators import step_info
from sam_optax._combinators.gradient_functions import Evaluation, FirstPass
from sam_optax._internal import averages, control_flow, devices, trees
from sam_optax._perturbations.perturbation import Perturbation


class Gradients(NamedTuple):
    """What the passes of a step give.

    Attributes:
      grads: the sharp gradient, or the plain one of a step that does not perturb.
      first: loss and aux (or ``None``) and the gradient of the first pass.
      perturbation_state: new state of the perturbation.
      climbed: what ``info=True`` asks for, else ``None``.
    """

    grads: optax.Updates
    first: FirstPass
    perturbation_state: optax.OptState
    climbed: step_info.Climb | None


@dataclasses.dataclass(frozen=True)
class Passes:
    """How a step evaluates its gradients; the attributes are ``sharpness_aware``'s arguments."""

    method: Perturbation
    ascent_steps: int
    perturb_dtype: Any | None
    axis_name: devices.AxisName | None
    sync_perturbation: bool
    norm_axis_name: devices.AxisName | None
    groups: int | None
    info: bool

    @property
    def own_axis(self) -> devices.AxisName | None:
        """The axis along which devices perturb differently."""
        return None if self.sync_perturbation else self.axis_name

    @property
    def ascent_axis(self) -> devices.AxisName | None:
        """The axis over which ascent gradients are averaged."""
        return self.axis_name if self.sync_perturbation else None

    def evaluations(self, grads_given: bool) -> int:
        """How many gradients a perturbing step evaluates (of each group)."""
        if self.method.single_pass:
            return self.method.samples
        first = self.method.has_start or not grads_given
        return (self.ascent_steps + first) * self.method.samples

    def first_pass(
        self, evaluate: Evaluation, updates: optax.Updates | None, params: optax.Params
    ) -> FirstPass | None:
        """The pass at the params, if perturbing and other steps have it in common."""
        if updates is not None:
            return None, updates
        if self.method.has_start or self.groups:
            return None
        return self._local(evaluate)(params)

    def plain(
        self,
        evaluate: Evaluation,
        first: FirstPass | None,
        state: optax.OptState,
        params: optax.Params,
    ) -> Gradients:
        """The passes of a step that does not perturb."""
        if first is None and self.groups:
            first = averages.scan_mean(
                lambda i: self._local(evaluate, i)(params),
                self.groups,
                lambda shapes: self._like(shapes, params),
            )
        elif first is None:
            first = self._local(evaluate)(params)
        return Gradients(first[1], first, state, step_info.no_climb(params) if self.info else None)

    def sharp(
        self,
        evaluate: Evaluation,
        ascent: Evaluation | None,
        first: FirstPass | None,
        state: optax.OptState,
        params: optax.Params,
        extra: dict[str, Any],
    ) -> Gradients:
        """The passes of a perturbing step, where ``ascent`` (or ``evaluate``) leads the ascent."""
        own_params = devices.local(params, self.own_axis)
        own_state = devices.local(state, self.own_axis)
        if self.norm_axis_name is not None:
            extra = {"norm_axis_name": self.norm_axis_name, **extra}
        if self.own_axis is not None:
            # For state that cannot be averaged afterwards.
            extra = {"state_axis_name": self.own_axis, **extra}

        def part(first: FirstPass | None, *index: chex.Numeric) -> Gradients:
            """The passes of one sample of one group."""
            group = [i // self.method.samples for i in index] if self.groups else []
            return self._perturbed(
                self._local(evaluate, *group),
                None if ascent is None else self._local(ascent, *group),
                first,
                own_state,
                own_params,
                {**self._draw(*index), **extra},
            )

        if self._parts > 1 or self.groups:

            def like_of(shapes: Gradients) -> Gradients:
                climbed = step_info.no_climb(params) if self.info else None
                first = self._like(shapes.first, params)
                climbed = devices.local(climbed, self.axis_name)
                return Gradients(first[1], first, own_state, climbed)

            result = averages.scan_mean(lambda i: part(None, i), self._parts, like_of)
        else:
            result = part(first)
        # Averaging what is not integer keeps the state the same on all devices: the moving
        # average of F-SAM, being linear in the gradient, then sees the mean gradient.
        new_state = devices.pmean(result.perturbation_state, self.own_axis)
        climbed = devices.pmean(result.climbed, self.axis_name)
        return result._replace(perturbation_state=new_state, climbed=climbed)

    def _local(self, evaluate: Evaluation, *group: chex.Numeric) -> Callable[..., FirstPass]:
        """This device's evaluation, of one group."""
        return lambda point: evaluate(devices.local(point, self.axis_name), *group)

    def _like(self, shapes: FirstPass, params: optax.Params) -> FirstPass:
        """A tree like a first pass, which varies from device to device as that does."""
        value = jax.tree.map(trees.zeros_like, shapes[0])
        return devices.local((value, params), self.axis_name)

    @property
    def _parts(self) -> int:
        """Number of perturbations in a step: of each group, every sample of the start."""
        return (self.groups or 1) * self.method.samples

    def _draw(self, *index: chex.Numeric) -> dict[str, chex.Numeric]:
        draw = devices.draw_index(self.own_axis, self._parts, index)
        return {} if draw is None else {"draw_index": draw}

    def _perturbed(
        self,
        evaluate: Callable[..., FirstPass],
        ascent: Callable[..., FirstPass] | None,
        first: FirstPass | None,
        state: optax.OptState,
        params: optax.Params,
        extra: dict[str, Any],
    ) -> Gradients:
        """Ascent, then the gradient at the point that it reaches."""
        # Names of axes and functions are no arguments of what is jitted.
        start_extra = {k: v for k, v in extra.items() if trees.all_arrays(v)}

        def ascent_pass(point: optax.Params, state: optax.OptState) -> FirstPass:
            if self.method.has_start and self.perturb_dtype is not None:
                # The start, too, is not to be rounded away.
                point = trees.as_perturbed(point, self.perturb_dtype)
            return (ascent or evaluate)(self.method.start_fn(point, state, **start_extra))

        def climb(
            point: optax.Params, grads: optax.Updates, state: optax.OptState
        ) -> tuple[optax.Params, optax.OptState]:
            grads = devices.pmean(grads, self.ascent_axis)
            return self.method.perturb(point, grads, state, self.perturb_dtype, extra)

        if first is None or ascent is not None or self.method.has_start:
            first = ascent_pass(params, state)
        point, state = control_flow.repeat(
            self.ascent_steps - 1,
            lambda carry: climb(carry[0], ascent_pass(*carry)[1], carry[1]),
            climb(params, first[1], state),
        )
        # The start of a single pass is the perturbed point, where the gradient is known.
        value, grads = first if self.method.single_pass else evaluate(point)
        climbed = None
        if self.info:
            losses = None, None
            at_params = ascent is None and not self.method.has_start
            if at_params and first[0] is not None and value is not None:
                losses = first[0][0], value[0]
            climbed = step_info.climb(params, point, losses, self.norm_axis_name)
        if self.perturb_dtype is not None:
            grads = trees.map_inexact(trees.cast_like, grads, params)
            if self.method.has_start:
                first = first[0], trees.map_inexact(trees.cast_like, first[1], params)
        if ascent is not None:
            # Loss and aux of the whole batch; dtypes as in steps that do not perturb.
            first = value, trees.map_inexact(trees.as_dtype_of, first[1], grads)
        return Gradients(grads, first, state, climbed)
