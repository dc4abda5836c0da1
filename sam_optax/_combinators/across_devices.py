"""Data-parallel devices: which gradients are averaged, and which one each device perturbs by."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jax import lax

from sam_optax._combinators.batch_parts import Perturbed
from sam_optax._combinators.gradient_functions import Evaluation, Evaluations, Pass
from sam_optax._combinators.perturbed_gradient import Gradients
from sam_optax._internal import devices, trees
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

    def evaluations(self, loss: Evaluations) -> Evaluations:
        """Per-device gradients; ascent gradients are averaged if all devices share one ε."""

        def own(evaluate: Evaluation) -> Evaluation:
            return lambda params, *group: evaluate(devices.local(params, self.axis_name), *group)

        ascent = own(loss.ascent)
        if not self.sync_perturbation:
            return loss._replace(sharp=own(loss.sharp), ascent=ascent)
        return loss._replace(
            sharp=own(loss.sharp), ascent=lambda *args: self._synchronized(ascent(*args))
        )

    def synchronized(self, grads: optax.Updates) -> optax.Updates:
        """The ascent gradient that each device perturbs by."""
        return devices.pmean(grads, self.axis_name) if self.sync_perturbation else grads

    def _synchronized(self, found: Pass) -> Pass:
        return found._replace(grads=self.synchronized(found.grads))

    def perturbed(self, perturbed: Perturbed) -> Perturbed:
        """``perturbed`` per device, with local params and state; the new states are averaged."""

        def on_devices(
            loss: Evaluations,
            first: Pass | None,
            state: optax.OptState,
            params: optax.Params,
            extra: ExtraArgs,
        ) -> Gradients:
            own = {"norm_axis_name": self.norm_axis_name, "state_axis_name": self.own_axis}
            found = perturbed(
                loss,
                None if first is None else self._synchronized(first),
                devices.local(state, self.own_axis),
                devices.local(params, self.own_axis),
                {**{name: axis for name, axis in own.items() if axis is not None}, **extra},
            )
            # Averaging the non-integer leaves keeps the state equal on all devices. The moving
            # average of F-SAM is linear in the gradient, so it then sees the mean gradient.
            return found._replace(
                perturbation_state=devices.pmean(found.perturbation_state, self.own_axis),
                climb=devices.pmean(found.climb, self.axis_name),
            )

        return on_devices

    def mean(self, tree: PyTree) -> PyTree:
        """The mean over the devices."""
        return devices.pmean(tree, self.axis_name)


def one_each(
    evaluate: Evaluation, point: optax.Params, ahead: optax.Params, axis_name: str
) -> tuple[optax.Updates, optax.Updates]:
    """The gradients at both points, each of which one of two devices evaluates."""
    if (size := lax.psum(1, axis_name)) != 2:
        raise ValueError(
            f"axis_name={axis_name!r} must be an axis of two devices, one for each gradient, got "
            f"{size}."
        )
    first = lax.axis_index(axis_name) == 0
    own = trees.map_inexact(lambda p, q: jnp.where(first, p, q), point, ahead)
    grads = evaluate(own).grads

    def of(mine: jax.Array) -> jax.Array:
        return trees.map_inexact(
            lambda g: lax.psum(jnp.where(mine, g, jnp.zeros_like(g)), axis_name), grads
        )

    return of(first), of(~first)
