"""Data-parallel devices: whose gradients are averaged, and who perturbs by which gradient."""

import dataclasses
from typing import Any

import optax

from sam_optax._combinators.batch_parts import Perturbed
from sam_optax._combinators.gradient_functions import Evaluation, Evaluations, Pass
from sam_optax._combinators.perturbed_gradient import Gradients
from sam_optax._internal import devices
from sam_optax._internal.devices import AxisName
from sam_optax._internal.types import PyTree


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
        """Each device's own gradients; those of the ascent averaged, if all perturb alike."""

        def own(evaluate: Evaluation) -> Evaluation:
            return lambda params, *group: evaluate(devices.local(params, self.axis_name), *group)

        ascent = own(loss.ascent)
        if not self.sync_perturbation:
            return loss._replace(sharp=own(loss.sharp), ascent=ascent)
        return loss._replace(
            sharp=own(loss.sharp), ascent=lambda *args: self._synchronized(ascent(*args))
        )

    def synchronized(self, grads: optax.Updates) -> optax.Updates:
        """The gradient that devices perturb by."""
        return devices.pmean(grads, self.axis_name) if self.sync_perturbation else grads

    def _synchronized(self, found: Pass) -> Pass:
        return found._replace(grads=self.synchronized(found.grads))

    def perturbed(self, perturbed: Perturbed) -> Perturbed:
        """``perturbed`` on every device from its own copy of params and state, states averaged."""

        def on_devices(
            loss: Evaluations,
            first: Pass | None,
            state: optax.OptState,
            params: optax.Params,
            extra: dict[str, Any],
        ) -> Gradients:
            own = {"norm_axis_name": self.norm_axis_name, "state_axis_name": self.own_axis}
            found = perturbed(
                loss,
                None if first is None else self._synchronized(first),
                devices.local(state, self.own_axis),
                devices.local(params, self.own_axis),
                {**{name: axis for name, axis in own.items() if axis is not None}, **extra},
            )
            # Averaging what is not integer keeps the state the same on all devices: the moving
            # average of F-SAM, being linear in the gradient, then sees the mean gradient.
            return found._replace(
                perturbation_state=devices.pmean(found.perturbation_state, self.own_axis),
                climb=devices.pmean(found.climb, self.axis_name),
            )

        return on_devices

    def mean(self, tree: PyTree) -> PyTree:
        """The mean over the devices."""
        return devices.pmean(tree, self.axis_name)
