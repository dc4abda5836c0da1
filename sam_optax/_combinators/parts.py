"""The parts of a step whose gradients are averaged: devices, groups of the batch, samples."""

import dataclasses
import warnings
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax import lax
from optax import OptState, Params, Updates

from sam_optax._combinators import step_info
from sam_optax._combinators.branch_dtypes import in_dtypes_of_sharp
from sam_optax._combinators.gradient_functions import Evaluation, Evaluations, Pass
from sam_optax._combinators.perturbed_gradient import Gradients, PerturbedGradient
from sam_optax._internal import control_flow, devices, trees
from sam_optax._internal.devices import AxisName
from sam_optax._internal.types import ExtraArgs, PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Devices:
    """The axes of a step; the attributes are arguments of :func:`sharpness_aware`."""

    axis_name: AxisName | None
    sync_perturbation: bool
    norm_axis_name: AxisName | None

    @property
    def own_axis(self) -> AxisName | None:
        """The axis along which devices perturb differently."""
        return None if self.sync_perturbation else self.axis_name

    def mean(self, tree: PyTree) -> PyTree:
        """The mean over the devices."""
        return devices.pmean(tree, self.axis_name)

    def synchronized(self, grads: Updates) -> Updates:
        """The ascent gradient that each device perturbs by."""
        return self.mean(grads) if self.sync_perturbation else grads

    def _synchronized(self, found: Pass) -> Pass:
        return found._replace(grads=self.synchronized(found.grads))

    def evaluations(self, loss: Evaluations) -> Evaluations:
        """Per-device gradients; ascent gradients are averaged if all devices share one ε."""

        def own(evaluate: Evaluation) -> Evaluation:
            return lambda params, *group: evaluate(devices.local(params, self.axis_name), *group)

        ascent = own(loss.ascent)
        return loss._replace(
            sharp=own(loss.sharp), ascent=lambda *args: self._synchronized(ascent(*args))
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AveragedGradients:
    """The gradients of a perturbing step, averaged over all its parts.

    Attributes:
      one: the gradients of one part.
      devices: the axes of the step.
      groups: the number of groups of the batch, or ``None``.
    """

    one: PerturbedGradient
    devices: Devices
    groups: int | None

    def __call__(
        self,
        loss: Evaluations,
        first: Pass | None,
        state: OptState,
        params: Params,
        extra: ExtraArgs,
    ) -> Gradients:
        """The mean over the devices, on each of which params and state are local."""
        own_axis = self.devices.own_axis
        axes = {"norm_axis_name": self.devices.norm_axis_name, "state_axis_name": own_axis}
        found = self._over_parts(
            loss,
            None if first is None else self.devices._synchronized(first),
            devices.local(state, own_axis),
            devices.local(params, own_axis),
            {**extra, **axes},
        )
        # Averaging the non-integer leaves keeps the state equal on all devices. The moving average
        # of F-SAM is linear in the gradient, so it then sees the mean gradient.
        return found._replace(
            perturbation_state=devices.pmean(found.perturbation_state, own_axis),
            climb=self.devices.mean(found.climb),
        )

    def _over_parts(self, loss: Evaluations, first: Pass | None, *rest: Any) -> Gradients:
        """The mean over all samples of all groups, evaluated sequentially."""
        parts = (self.groups or 1) * self.one.method.samples
        if parts == 1 and not self.groups:
            return self._part((), loss, first, *rest)
        _, params, _ = rest
        return control_flow.mean_of(lambda i: self._part((i,), loss, None, *rest), parts, params)

    def _part(
        self,
        index: tuple[chex.Numeric, ...],
        loss: Evaluations,
        first: Pass | None,
        state: OptState,
        params: Params,
        extra: ExtraArgs,
    ) -> Gradients:
        """One sample of one group; ``draw_index`` tells it from the others, and devices apart."""
        samples = self.one.method.samples
        if self.groups:
            group = index[0] // samples
            loss = Evaluations(of_group(loss.sharp, group), of_group(loss.ascent, group), loss[2])
        parts = (self.groups or 1) * samples
        draw = devices.draw_index(self.devices.own_axis, parts, index)
        return self.one(loss, first, state, params, {**extra, "draw_index": draw})

    def plain(
        self, loss: Evaluations, first: Pass | None, leads: bool, state: OptState, params: Params
    ) -> Gradients:
        """The gradients of a step that does not perturb: both are the one at the params.

        Args:
          loss: the step's gradient functions.
          first: the gradient at the params, if it is known.
          leads: whether it is the ascent gradient of a step that perturbs, whose dtypes g has then.
          state: state of the perturbation.
          params: w.
        """
        g = self._plain_pass(loss.sharp, params) if first is None else first
        dtype = self.one.perturb_dtype
        grads = in_dtypes_of_sharp(g.grads, loss.sharp, params, dtype, self.groups)
        ascent = self.devices.synchronized(g.grads if leads else grads)
        climb = step_info.no_climb(params) if self.one.info else None
        return Gradients(g.value, ascent, grads, state, climb)

    def _plain_pass(self, evaluate: Evaluation, params: Params) -> Pass:
        """The gradient at the params, on the whole batch."""
        if self.groups:
            return control_flow.mean_of(lambda i: evaluate(params, i), self.groups, params)
        return evaluate(params)

    def mean(self, found: Gradients) -> Gradients:
        """Both gradients averaged over the devices."""
        if self.devices.axis_name is None and self.devices.norm_axis_name is None:
            warn_of_drift("sharpness_aware", found.sharp)
        return found._replace(
            ascent=self.devices.mean(found.ascent), sharp=self.devices.mean(found.sharp)
        )


def warn_of_drift(who: str, grads: Updates) -> None:
    """Warns if devices take different gradients, as far as JAX shows it.

    Under ``jax.pmap`` and without ``check_vma`` a ``grad_fn`` that averages over the devices itself
    looks the same.
    """
    axes = [axis for axis in devices.manual_axes() if not devices.all_replicated(grads, axis)]
    if axes:
        names = axes[0] if len(axes) == 1 else tuple(axes)
        warnings.warn(
            f"{who} is traced under the axis {names!r} of jax.pmap or jax.shard_map without "
            "axis_name: if grad_fn returns each device's own gradient, the params of the "
            "devices drift apart, even if grads are averaged. Pass "
            f"axis_name={names!r}, with grad_fn and grads of each device, not averaged; or "
            f"norm_axis_name={names!r} if the params are sharded over the axis; or axis_name=() if "
            "grad_fn averages over the devices itself, or each device trains its own params.",
            UserWarning,
            stacklevel=2,
        )


def of_group(evaluate: Evaluation, group: chex.Numeric) -> Evaluation:
    """The gradient on one group of the batch."""
    return lambda params: evaluate(params, group)


def one_each(
    evaluate: Evaluation, point: Params, ahead: Params, axis_name: AxisName
) -> tuple[Updates, Updates]:
    """The gradients at both points, each of which one of two devices evaluates."""
    if (size := lax.psum(1, axis_name)) != 2:
        raise ValueError(
            f"axis_name={axis_name!r} must be an axis of two devices, one for each gradient, got "
            f"{size}."
        )
    first = lax.axis_index(axis_name) == 0
    own = evaluate(trees.map_inexact(lambda p, q: jnp.where(first, p, q), point, ahead)).grads
    if not devices.shows_variation(axis_name):
        other = trees.map_inexact(lambda g: lax.ppermute(g, axis_name, [(0, 1), (1, 0)]), own)
        pairs = [(own, other), (other, own)]
        return tuple(
            trees.map_inexact(lambda x, y: jnp.where(first, x, y), *pair) for pair in pairs
        )

    def of(mine: jax.Array) -> jax.Array:
        return trees.map_inexact(
            lambda g: lax.psum(jnp.where(mine, g, jnp.zeros_like(g)), axis_name), own
        )

    return of(first), of(~first)
