"""Hyperparameters: checks of static values, and the one place where schedules are evaluated."""

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike
from optax import OptState, Params, Updates
from typing_extensions import TypeAliasType

from sam_optax._internal.checks import require_state
from sam_optax._internal.types import Function

Hyperparameter = TypeAliasType(
    "Hyperparameter", float | chex.Numeric | Callable[[chex.Numeric], chex.Numeric]
)
"""A number, a JAX scalar (traced or not) or an optax schedule of the training step."""


class ScheduleState(NamedTuple):
    """State of a transformation with a schedule among its hyperparameters.

    Attributes:
      step: int32 scalar, the training step of the next call.
      inner_state: the state that it has without schedules.
    """

    step: chex.Array
    inner_state: OptState


def check(
    name: str,
    value: object,
    *,
    lower: float,
    upper: float = math.inf,
    lower_allowed: bool = True,
    upper_allowed: bool = False,
    schedule: bool = True,
) -> None:
    """Raises unless ``value`` is a schedule, a traced scalar or a number in range.

    Args:
      name: the argument's name, for the message.
      value: what the caller passed.
      lower: lower end of the range.
      upper: upper end of the range.
      lower_allowed: whether ``lower`` itself is in the range.
      upper_allowed: whether ``upper`` itself is in the range.
      schedule: whether it may be a schedule.

    Raises:
      TypeError: ``value`` is not a number, a scalar or a schedule.
      ValueError: ``value`` is a number outside the range.
    """
    if callable(value) and schedule:
        return
    if isinstance(value, jax.Array):
        if value.shape != ():
            raise TypeError(f"{name} must be a scalar, got an array of shape {value.shape}.")
        if isinstance(value, jax.core.Tracer) or not value.is_fully_addressable:
            return  # traced: its value is not known here
        value = np.asarray(value).item()
    elif isinstance(value, np.ndarray) and value.shape == ():
        value = value.item()
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        kinds = "a number or a JAX scalar"
        if schedule:
            kinds = "a number, a JAX scalar or an optax schedule (a function of the training step)"
        raise TypeError(f"{name} must be {kinds}, got {value!r}.")
    value = float(value)
    below_upper = value <= upper if upper_allowed else value < upper
    above_lower = value >= lower if lower_allowed else value > lower
    if not (above_lower and below_upper):
        left, right = "[" if lower_allowed else "(", "]" if upper_allowed else ")"
        raise ValueError(f"{name} must be in {left}{lower:g}, {upper:g}{right}, got {value!r}.")


def check_number(name: str, value: object, **interval: Any) -> None:
    """Raises unless ``value`` is a static number in the interval that :func:`check` takes."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{name} must be a static number, got {value!r}.")
    check(name, value, schedule=False, **interval)


def check_float_dtype(name: str, dtype: DTypeLike | None) -> np.dtype | None:
    """The canonical dtype, or ``None``; raises unless it is a floating-point dtype."""
    if dtype is None:
        return None
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"{name} must be a floating-point dtype, got {jnp.dtype(dtype).name!r}.")
    return jnp.dtype(dtype)


def check_transformation(name: str, value: object) -> None:
    """Raises unless ``value`` is a gradient transformation."""
    if isinstance(value, optax.MultiSteps):
        raise TypeError(
            f"{name} must be an optax.GradientTransformation, but optax.MultiSteps is not one: "
            "pass optax.MultiSteps(...).gradient_transformation()."
        )
    if not isinstance(value, optax.GradientTransformation):
        raise TypeError(
            f"{name} must be an optax.GradientTransformation, such as optax.sgd(0.1), got "
            f"{value!r}."
        )


def check_integer(name: str, value: object, *, lower: int) -> None:
    """Raises unless ``value`` is a static integer ≥ ``lower``."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(
            f"{name} must be a static integer (name it in static_args inside "
            f"optax.inject_hyperparams), got {value!r}."
        )
    if value < lower:
        raise ValueError(f"{name} must be at least {lower}, got {value!r}.")


class _StaticDefault(np.int32):
    """An integer that is shown as one."""

    def __repr__(self) -> str:
        return str(int(self))


def static_default(value: int) -> Any:
    """A default for a static argument, which ``optax.inject_hyperparams`` does not change.

    ``inject_hyperparams`` turns defaults that are Python numbers into hyperparameters, and so into
    traced values, but not NumPy scalars: ``inject_hyperparams(sam)(rho=0.1)`` then needs no
    ``static_args``.
    """
    return _StaticDefault(value)


class Scheduled(NamedTuple):
    """The functions of a transformation, which take its hyperparameters as numbers.

    Attributes:
      init: ``params -> state``.
      update: ``(updates, state, params, *, training_step, **hyperparameters, **extra)``.
      start: ``(params, state, *, training_step, **hyperparameters, **extra) -> params``.
    """

    init: optax.TransformInitFn
    update: Function
    start: Function


def scheduled(
    values: Mapping[str, Hyperparameter],
    init: optax.TransformInitFn,
    update: Function,
    start: Function,
) -> Scheduled:
    """Evaluates hyperparameters before ``update`` and ``start`` see them.

    The training step is the caller's, who also counts steps that do not perturb or are skipped. On
    its own, a transformation with schedules counts its calls, in a :class:`ScheduleState`.
    """
    schedules = {name: value for name, value in values.items() if callable(value)}
    if not schedules:
        return Scheduled(
            init,
            lambda *args, **extra: update(*args, **{**extra, **values}),
            lambda *args, **extra: start(*args, **{**extra, **values}),
        )

    def at(step: chex.Numeric) -> dict[str, Any]:
        return {**values, **{name: schedule(step) for name, schedule in schedules.items()}}

    def init_fn(params: Params) -> ScheduleState:
        return ScheduleState(jnp.zeros((), jnp.int32), init(params))

    def update_fn(
        updates: Updates,
        state: ScheduleState,
        params: Params | None = None,
        *,
        training_step: chex.Numeric | None = None,
        **extra: Any,
    ) -> tuple[Updates, ScheduleState]:
        require_state("state", state, ScheduleState)
        step = state.step if training_step is None else training_step
        given = {**extra, "training_step": training_step, **at(step)}
        updates, inner_state = update(updates, state.inner_state, params, **given)
        next_step = optax.safe_increment(jnp.asarray(step, jnp.int32))
        return updates, ScheduleState(next_step, inner_state)

    def start_fn(
        params: Params,
        state: ScheduleState,
        *,
        training_step: chex.Numeric | None = None,
        **extra: Any,
    ) -> Params:
        step = state.step if training_step is None else training_step
        given = {**extra, "training_step": training_step, **at(step)}
        return start(params, state.inner_state, **given)

    return Scheduled(init_fn, update_fn, start_fn)


def saturating_sum(a: jax.Array, b: jax.Array) -> jax.Array:
    """The sum of two counts, at most the largest integer, as ``optax.safe_increment`` has it."""
    return jnp.minimum(a, jnp.iinfo(jnp.int32).max - b) + b


def state_type(unscheduled: type, *values: Hyperparameter) -> type:
    """The type of the state of a transformation with these hyperparameters."""
    return ScheduleState if any(map(callable, values)) else unscheduled


def evaluate(value: Hyperparameter, step: chex.Numeric) -> chex.Numeric:
    """The hyperparameter's value at a training step, for what is no transformation."""
    return value(step) if callable(value) else value
