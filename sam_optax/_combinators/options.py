"""The options of :func:`sam_optax.sharpness_aware`, with their checks."""

import dataclasses

from jax.typing import DTypeLike
from optax import Params, Updates

from sam_optax._combinators.checks import check_params
from sam_optax._internal import devices
from sam_optax._internal.checks import require_gradient
from sam_optax._internal.devices import AxisName
from sam_optax._internal.hyperparameters import check_integer
from sam_optax._internal.types import Function, PyTree
from sam_optax._perturbations.perturbation import Perturbation
from sam_optax._schedules.when import GradNormWhen, When, check_when


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How a step evaluates gradients; the attributes are arguments of :func:`sharpness_aware`."""

    method: Perturbation
    ascent_steps: int
    when: When | None
    skip_nonfinite: bool
    perturb_dtype: DTypeLike | None
    axis_name: AxisName | None
    sync_perturbation: bool
    norm_axis_name: AxisName | None
    groups: int | None
    info: bool

    def __post_init__(self) -> None:
        """Raises for options that are out of range or exclude each other."""
        check_integer("ascent_steps", self.ascent_steps, lower=1)
        if self.method.single_pass and self.ascent_steps > 1:
            raise ValueError(
                "ascent_steps must be 1 for a perturbation that takes its only gradient at its "
                f"start (momentum_start, low_pass), got {self.ascent_steps!r}."
            )
        check_when(self.when)
        if isinstance(self.when, GradNormWhen) and (self.method.has_start or self.groups):
            raise ValueError(
                "when sees the norm of the gradient at the params (above_average), which a step "
                "with groups or with a perturbation that has a start (random_start, rsam, "
                "low_pass, momentum_start) does not evaluate: use every, after or bernoulli."
            )
        if self.groups is not None:
            check_integer("groups", self.groups, lower=1)
        if self.norm_axis_name and self.method.has_start:
            raise ValueError(
                f"norm_axis_name={self.norm_axis_name!r} cannot be used with a random start, whose "
                "noise is scaled by the norms of whole kernels. Shard the params under jit instead."
            )
        if self.sync_perturbation and not self.axis_name:
            raise ValueError(
                "sync_perturbation=True needs axis_name, the axis to synchronize over."
            )

    def check_update(
        self,
        updates: Updates | None,
        params: Params | None,
        value_and_grad_fn: Function | None,
        ascent_grad_fn: Function | None,
    ) -> None:
        """Raises for arguments of ``update`` that do not match each other or the options."""
        check_params(params)
        if value_and_grad_fn is not None and updates is not None and not self.method.has_start:
            raise ValueError(
                "value_and_grad_fn requires grads=None: if you have the gradient at the params, "
                "you have the loss too. Pass grads and grad_fn."
            )
        if ascent_grad_fn is not None and isinstance(self.when, GradNormWhen):
            raise ValueError(
                "ascent_grad_fn is for perturbing steps only, and when sees the norm of the "
                "gradient at the params (above_average): leave one of them out."
            )
        if ascent_grad_fn is not None and self.method.single_pass:
            raise ValueError(
                "ascent_grad_fn cannot be used with a perturbation that takes its only gradient at "
                "its start (momentum_start, low_pass): leave it out."
            )
        devices.require_bound("axis_name", self.axis_name)
        devices.require_bound("norm_axis_name", self.norm_axis_name)
        devices.check_local(updates, self.axis_name)
        if updates is not None and value_and_grad_fn is None:
            require_gradient("grads", updates, params)

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

    def evaluates_once(self, given: bool) -> bool:
        """Whether a step evaluates a single gradient; ``given``: the one at the params is known."""
        if self.when is not None or self.groups is not None:
            return False
        if self.method.single_pass:
            return self.method.samples == 1
        return given and self.ascent_steps == 1 and not self.method.has_start
