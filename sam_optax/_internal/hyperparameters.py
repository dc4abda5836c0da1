"""Hyperparameters: checks of static values and evaluation of schedules."""

import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

Hyperparameter: TypeAlias = float | chex.Numeric | Callable[[chex.Numeric], chex.Numeric]
"""A number, a JAX scalar (traced or not) or an optax schedule of the training step."""


class ScheduleState(NamedTuple):
    """Step count of a perturbation with a schedule among its hyperparameters.

    Attributes:
      step: int32 scalar, the training step of the next call.
    """

    step: chex.Array


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


def static_default(value: int) -> Any:
    """A default for a static argument, which ``optax.inject_hyperparams`` does not change.

    ``inject_hyperparams`` turns defaults that are Python numbers into hyperparameters, and so into
    traced values, but not NumPy scalars: ``inject_hyperparams(sam)(rho=0.1)`` then needs no
    ``static_args``.
    """
    return np.int32(value)


def schedules_type(*values: Hyperparameter) -> type:
    """The type that :func:`init_schedules` returns."""
    return ScheduleState if any(callable(value) for value in values) else optax.EmptyState


def init_schedules(*values: Hyperparameter) -> ScheduleState | optax.EmptyState:
    """State for hyperparameters: a step count if any of them is a schedule, else none."""
    if schedules_type(*values) is ScheduleState:
        return ScheduleState(step=jnp.zeros((), jnp.int32))
    return optax.EmptyState()


def step_of(state: optax.OptState, training_step: chex.Numeric | None) -> chex.Numeric | None:
    """The training step of a call: the caller's step count, or the state's if none is given.

    ``sharpness_aware`` passes ``training_step``, so that schedules also count steps that do not
    perturb. On its own, a perturbation counts its calls.
    """
    return getattr(state, "step", None) if training_step is None else training_step


def advance(state: optax.OptState, step: chex.Numeric | None) -> optax.OptState:
    """The state after a call for training step ``step``."""
    if isinstance(state, ScheduleState):
        return ScheduleState(step=optax.safe_increment(jnp.asarray(step, jnp.int32)))
    return state


def evaluate(value: Hyperparameter, step: chex.Numeric | None) -> chex.Numeric:
    """The hyperparameter's value at a training step."""
    return value(step) if callable(value) else value
