"""Hyperparameters: checks of static values, and the one place where schedules are evaluated."""

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from chex import Array, Numeric
from jax.typing import DTypeLike
from optax import OptState, Params, TransformInitFn, Updates
from typing_extensions import TypeAliasType

from sam_optax._internal.checks import require_state
from sam_optax._internal.types import ExtraArgs, Function

Hyperparameter = TypeAliasType("Hyperparameter", float | Numeric | Callable[[Numeric], Numeric])
"""A number, a JAX scalar (traced or not) or an optax schedule of the training step."""


class ScheduleState(NamedTuple):
    """State of a transformation with a schedule among its hyperparameters.

    Attributes:
      step: int32 scalar, the training step of the next call.
      inner_state: the state that it has without schedules.
    """

    step: Array
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
    """Raises unless ``value`` is a traced scalar, a number in range or (if allowed) a schedule."""
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


def name_check(name: str, literal: Any) -> Callable[[object], None]:
    """A function that raises unless its argument is one of the names in a ``Literal``."""

    def check_name(value: object) -> None:
        if value not in get_args(literal):
            known = ", ".join(map(repr, get_args(literal)))
            raise ValueError(f"{name} must be one of {known}, got {value!r}.")

    return check_name


def check_float_dtype(name: str, dtype: DTypeLike | None) -> np.dtype | None:
    """The canonical dtype, or ``None``; raises unless it is a floating-point dtype."""
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"{name} must be a floating-point dtype, got {jnp.dtype(dtype).name!r}.")
    return None if dtype is None else jnp.dtype(dtype)


def check_transformation(name: str, value: object) -> None:
    """Raises unless ``value`` is a gradient transformation."""
    if isinstance(value, optax.MultiSteps):
        raise TypeError(
            f"{name} must be an optax.GradientTransformation, but optax.MultiSteps is not one: "
            "pass optax.MultiSteps(...).gradient_transformation()."
        )
    if not isinstance(value, optax.GradientTransformation):
        wanted = "an optax.GradientTransformation, such as optax.sgd(0.1)"
        raise TypeError(f"{name} must be {wanted}, got {value!r}.")


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
    def __repr__(self) -> str:
        return str(int(self))


def static_default(value: int) -> Any:
    """A static default: ``optax.inject_hyperparams`` traces Python numbers, not NumPy scalars."""
    return _StaticDefault(value)


stateless = optax.identity().init
"""``init`` of a transformation without state."""


class Scheduled(NamedTuple):
    """The functions of a transformation, whose hyperparameters have been evaluated."""

    init: TransformInitFn
    update: Function
    start: Function


def scheduled(
    values: Mapping[str, Hyperparameter], init: TransformInitFn, update: Function, start: Function
) -> Scheduled:
    """Passes the hyperparameters as keyword arguments to ``update`` and ``start``, evaluated.

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

    def evaluated(state: ScheduleState, extra: ExtraArgs) -> tuple[Numeric, ExtraArgs]:
        given = {"training_step": None, **extra, **values}
        step = state.step if given["training_step"] is None else given["training_step"]
        return step, {**given, **{name: schedule(step) for name, schedule in schedules.items()}}

    def init_fn(params: Params) -> ScheduleState:
        return ScheduleState(jnp.zeros((), jnp.int32), init(params))

    def update_fn(
        updates: Updates, state: ScheduleState, params: Params | None = None, **extra: Any
    ) -> tuple[Updates, ScheduleState]:
        require_state("state", state, ScheduleState)
        step, given = evaluated(state, extra)
        updates, inner_state = update(updates, state.inner_state, params, **given)
        next_step = optax.safe_increment(jnp.asarray(step, jnp.int32))
        return updates, ScheduleState(next_step, inner_state)

    def start_fn(params: Params, state: ScheduleState, **extra: Any) -> Params:
        return start(params, state.inner_state, **evaluated(state, extra)[1])

    return Scheduled(init_fn, update_fn, start_fn)


def saturating_sum(a: jax.Array, b: jax.Array) -> jax.Array:
    """The sum of two counts, at most the largest integer, as ``optax.safe_increment`` has it."""
    return jnp.minimum(a, jnp.iinfo(jnp.int32).max - b) + b


def state_type(unscheduled: type, *values: Hyperparameter) -> type:
    """The type of the state of a transformation with these hyperparameters."""
    return ScheduleState if any(map(callable, values)) else unscheduled


def evaluate(value: Hyperparameter, step: Numeric) -> Numeric:
    """The hyperparameter's value at a training step, for what is no transformation."""
    return value(step) if callable(value) else value
