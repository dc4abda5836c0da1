"""The passes of one step: from the ascent gradient to the gradient at the perturbed params."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import optax

from sam_optax import _control, _parallel, _trees
from sam_optax._passes import Evaluation, FirstPass
from sam_optax._perturbation import Perturbation


class Gradients(NamedTuple):
    """What the passes of a step give.

    Attributes:
      grads: the sharp gradient, or the plain one of a step that does not perturb.
      first: loss and aux (or ``None``) and the gradient of the first pass.
      perturbation_state: new state of the perturbation.
    """

    grads: optax.Updates
    first: FirstPass
    perturbation_state: optax.OptState


@dataclasses.dataclass(frozen=True)
class Passes:
    """How a step evaluates its gradients; the attributes are ``sharpness_aware``'s arguments."""

    method: Perturbation
    ascent_steps: int
    perturb_dtype: Any | None
    axis_name: _parallel.AxisName | None
    sync_perturbation: bool
    norm_axis_name: _parallel.AxisName | None
    groups: int | None

    @property
    def own_axis(self) -> _parallel.AxisName | None:
        """The axis along which devices perturb differently."""
        return None if self.sync_perturbation else self.axis_name

    @property
    def ascent_axis(self) -> _parallel.AxisName | None:
        """The axis over which ascent gradients are averaged."""
        return self.axis_name if self.sync_perturbation else None

    def evaluations(self, grads_given: bool) -> int:
        """How many gradients a perturbing step evaluates (of each group)."""
        first = self.method.has_random_start or not grads_given
        return self.ascent_steps + first

    def first_pass(
        self, evaluate: Evaluation, updates: optax.Updates | None, params: optax.Params
    ) -> FirstPass | None:
        """The pass at the params, if perturbing and other steps have it in common."""
        if updates is not None:
            return None, updates
        if self.method.has_random_start or self.groups:
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
            like = (None, _parallel.local(params, self.axis_name))
            first = _parallel.scan_mean(
                lambda i: self._local(evaluate, i)(params), self.groups, like
            )
        elif first is None:
            first = self._local(evaluate)(params)
        return Gradients(first[1], first, state)

    def sharp(
        self,
        evaluate: Evaluation,
        first: FirstPass | None,
        state: optax.OptState,
        params: optax.Params,
        extra: dict[str, Any],
    ) -> Gradients:
        """The passes of a perturbing step."""
        own_params = _parallel.local(params, self.own_axis)
        own_state = _parallel.local(state, self.own_axis)
        if self.norm_axis_name is not None:
            extra = {"norm_axis_name": self.norm_axis_name, **extra}

        def of_group(first: FirstPass | None, *group: chex.Numeric) -> Gradients:
            return self._perturbed(
                self._local(evaluate, *group),
                first,
                own_state,
                own_params,
                {**self._draw(*group), **extra},
            )

        if self.groups:
            local_params = _parallel.local(params, self.axis_name)
            like = Gradients(local_params, (None, local_params), own_state)
            result = _parallel.scan_mean(lambda i: of_group(None, i), self.groups, like)
        else:
            result = of_group(first)
        # Averaging what is not integer keeps the state the same on all devices: the moving
        # average of F-SAM, being linear in the gradient, then sees the mean gradient.
        new_state = _parallel.pmean(result.perturbation_state, self.own_axis)
        return result._replace(perturbation_state=new_state)

    def _local(self, evaluate: Evaluation, *group: chex.Numeric) -> Callable[..., FirstPass]:
        """This device's evaluation, of one group."""
        return lambda point: evaluate(_parallel.local(point, self.axis_name), *group)

    def _draw(self, *group: chex.Numeric) -> dict[str, chex.Numeric]:
        index = _parallel.draw_index(self.own_axis, self.groups, group)
        return {} if index is None else {"draw_index": index}

    def _perturbed(
        self,
        evaluate: Callable[..., FirstPass],
        first: FirstPass | None,
        state: optax.OptState,
        params: optax.Params,
        extra: dict[str, Any],
    ) -> Gradients:
        """Ascent, then the gradient at the point that it reaches."""
        start_extra = {k: extra[k] for k in ("training_step", "draw_index") if k in extra}

        def ascent_pass(point: optax.Params, state: optax.OptState) -> FirstPass:
            return evaluate(self.method.start_fn(point, state, **start_extra))

        def climb(
            point: optax.Params, grads: optax.Updates, state: optax.OptState
        ) -> tuple[optax.Params, optax.OptState]:
            grads = _parallel.pmean(grads, self.ascent_axis)
            return self.method.perturb(point, grads, state, self.perturb_dtype, extra)

        if first is None or self.method.has_random_start:
            first = ascent_pass(params, state)
        point, state = _control.repeat(
            self.ascent_steps - 1,
            lambda carry: climb(carry[0], ascent_pass(*carry)[1], carry[1]),
            climb(params, first[1], state),
        )
        _, grads = evaluate(point)
        if self.perturb_dtype is not None:
            grads = _trees.map_inexact(_trees.cast_like, grads, params)
        return Gradients(grads, first, state)
