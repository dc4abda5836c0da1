"""The gradients of one step: at the perturbed params, or at the params alone."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from chex import Numeric
from optax import OptState, Params, Updates

from sam_optax._combinators import checks, step_info
from sam_optax._combinators.gradient_functions import Evaluation, Evaluations, Pass
from sam_optax._combinators.options import Options
from sam_optax._internal import control_flow, devices, trees
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

    def mean(self, options: Options) -> "Gradients":
        """Both gradients averaged over the devices."""
        if options.axis_name is None and options.norm_axis_name is None:
            checks.warn_of_drift("sharpness_aware", self.sharp)
        return self._replace(ascent=options.mean(self.ascent), sharp=options.mean(self.sharp))


def on_devices(options: Options, loss: Evaluations) -> Evaluations:
    """Gradients of each device; ascent gradients are averaged if all devices share one ε."""

    def own(evaluate: Evaluation) -> Evaluation:
        return lambda w, *group: evaluate(devices.local(w, options.axis_name), *group)

    ascent = own(loss.ascent)
    return loss._replace(
        sharp=own(loss.sharp), ascent=lambda *args: _synchronized(options, ascent(*args))
    )


def _synchronized(options: Options, found: Pass) -> Pass:
    return found._replace(grads=options.synchronized(found.grads))


@dataclasses.dataclass(frozen=True)
class StepGradients:
    """The gradients of a step; ``extra`` are the arguments of the perturbation."""

    options: Options
    loss: Evaluations
    state: OptState
    params: Params
    extra: ExtraArgs

    def at_perturbed(self, first: Pass | None) -> Gradients:
        """The ascent gradient g and the sharp gradient g_s, on one part of the step.

        g   = ∇L(start(w))           (start(w) = w for most methods; ``first``, if known)
        w̃   = w + perturbation(g)    (again from w̃, for each further ascent step)
        g_s = ∇L(w̃)                 (g itself, where the start is w̃)
        """
        loss, method = self.loss, self.options.method
        g = loss.ascent(self._start(self.params, self.state)) if first is None else first

        def ascend_again(reached: tuple[Params, OptState]) -> tuple[Params, OptState]:
            return self._perturb(*reached, loss.ascent(self._start(*reached)).grads)

        reached = self._perturb(self.params, self.state, g.grads)
        further = int(self.options.ascent_steps) - 1
        point, new_state = control_flow.repeat(further, ascend_again, reached)
        g_s = g if method.single_pass else loss.sharp(point)

        value = g_s.value if loss.ascent_given else g.value
        climb = self._climb(point, g, g_s) if self.options.info else None
        # A step that does not perturb, the other branch of the same lax.cond, has these dtypes.
        ascent, sharp = g.grads, g_s.grads
        if self.options.perturb_dtype is not None:
            sharp = trees.map_inexact(trees.cast_like, sharp, self.params)
            if first is None:
                ascent = trees.map_inexact(trees.cast_like, ascent, self.params)
        if loss.ascent_given:
            ascent = trees.map_inexact(trees.as_dtype_of, ascent, sharp)
        return Gradients(value, ascent, sharp, new_state, climb)

    def _start(self, point: Params, state: OptState) -> Params:
        """The params at which the ascent gradient is evaluated."""
        if not self.options.method.has_start:
            return point
        if self.options.perturb_dtype is not None:
            # Cast first: in a narrow dtype, rounding may lose the start.
            point = trees.as_perturbed(point, self.options.perturb_dtype)
        return self.options.method.start_fn(point, state, **self.extra)

    def _perturb(self, w: Params, state: OptState, grads: Updates) -> tuple[Params, OptState]:
        """``w + ε`` and the new state of the perturbation."""
        method, dtype = self.options.method, self.options.perturb_dtype
        return perturbed_params(method, w, grads, state, dtype, self.extra)

    def _climb(self, point: Params, g: Pass, g_s: Pass) -> step_info.Climb:
        """The diagnostics."""
        start = losses = None
        if self.options.method.has_start:
            start = self._start(self.params, self.state)
        elif not (self.loss.ascent_given or g.value is None or g_s.value is None):
            losses = g.value[0], g_s.value[0]
        return step_info.climb(self.params, start, point, losses, self.options.norm_axis_name)

    def averaged(self, first: Pass | None) -> Gradients:
        """The gradients of a step that perturbs: the mean over samples of groups, one by one.

        ``first`` is the ascent gradient, if it is known.
        """
        options, own_axis = self.options, self.options.own_axis
        samples = options.method.samples
        parts = (options.groups or 1) * samples
        first = None if first is None else _synchronized(options, first)
        state, params = devices.local(self.state, own_axis), devices.local(self.params, own_axis)
        axes = {"norm_axis_name": options.norm_axis_name, "state_axis_name": own_axis}

        def part(*index: Numeric) -> Gradients:
            # The index of a draw differs between parts and between devices that perturb apart.
            draw = devices.draw_index(own_axis, parts, index)
            extra = {**self.extra, **axes, "draw_index": draw}
            loss = self.loss.of_group(index[0] // samples) if options.groups else self.loss
            return StepGradients(options, loss, state, params, extra).at_perturbed(first)

        alone = parts == 1 and not options.groups
        found = part() if alone else control_flow.mean_of(part, parts, params)
        # Averaging the non-integer leaves keeps the state equal on all devices. The moving average
        # of F-SAM is linear in the gradient, so it then sees the mean gradient.
        return found._replace(
            perturbation_state=devices.pmean(found.perturbation_state, own_axis),
            climb=options.mean(found.climb),
        )

    def plain(self, g: Pass | None, shared: bool) -> Gradients:
        """The gradients of a step that does not perturb: both are g, the one at the params.

        ``shared``: whether g is also the ascent gradient of steps that perturb, in its own dtypes.
        """
        options, evaluate = self.options, self.loss.sharp
        if g is None and options.groups:
            g = control_flow.mean_of(
                lambda i: evaluate(self.params, i), options.groups, self.params
            )
        elif g is None:
            g = evaluate(self.params)
        grads = self._in_dtypes_of_sharp(g.grads)
        ascent = options.synchronized(g.grads if shared else grads)
        climb = step_info.no_climb(self.params) if options.info else None
        return Gradients(g.value, ascent, grads, self.state, climb)

    def _in_dtypes_of_sharp(self, grads: Updates) -> Updates:
        """The gradient in the dtypes of a sharp one, since branches of ``lax.cond`` must agree.

        The caller's gradient may be wider or narrower than the result of ``grad_fn``.
        """
        given = self.options.perturb_dtype is not None
        # Outside of jit the branches need not agree, and checking would trace at every step.
        known = given or not control_flow.is_traced(self.params, grads)
        if known and trees.dtypes(grads) == trees.dtypes(self.params):
            return grads
        like = self.params
        if not given:
            group = [jnp.zeros((), jnp.int32)] if self.options.groups else []
            like = jax.eval_shape(self.loss.sharp, self.params, *group).grads
        return trees.map_inexact(trees.as_dtype_of, grads, like)
