"""Declaration of options, each with help text, default and allowed values."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable
from typing import Annotated, Any, NamedTuple, TypeVar

import tyro

from sam_optax.experiments.errors import UserError

Class = TypeVar("Class", bound=type)
METAVARS = {bool: "True|False", int: "INT", float: "FLOAT"}


class Allowed(NamedTuple):
    """The allowed values of an option, and the remedy for others."""

    has: Callable[[Any], bool]
    remedy: str


def one_of(names: Iterable[str]) -> Allowed:
    """One of some names."""
    names = tuple(names)
    return Allowed(lambda value: value in names, f"unknown; use one of {', '.join(names)}")


def at_least(least: int) -> Allowed:
    """An integer of at least ``least`` that fits into an int32."""
    remedy = f"use an integer of at least {least}, below 2^31"
    return Allowed(lambda value: least <= value < 2**31, remedy)


NOT_EMPTY = Allowed(bool, "is empty; give a name, or leave it out")
COUNT, COUNT_OR_ZERO = at_least(1), at_least(0)
POSITIVE = Allowed(lambda value: 0 < value < math.inf, "use a number above 0")
NOT_NEGATIVE = Allowed(lambda value: 0 <= value < math.inf, "use a number of at least 0")
SHARE = Allowed(lambda value: 0 <= value < 1, "use a number in [0, 1)")
SCALE = Allowed(lambda value: 0 < value <= 1, "use a number in (0, 1]")


def option(
    default: Any = None,
    allowed: Allowed | None = None,
    hint: str = "",
    metavar: str | None = None,
    help: str | None = None,
    **metadata: Any,
) -> Any:
    """A field that shows ``hint`` in its help if it has no default.

    Its docstring is its help. Pass ``help`` for long texts, since tyro keeps the line breaks.
    """
    shown = hint if default is None else None
    arg = tyro.conf.arg(help=help, metavar=metavar, help_behavior_hint=shown)
    return dataclasses.field(default=default, metadata={"arg": arg, "allowed": allowed, **metadata})


def setting(default: Any, allowed: Allowed | None = None, text: str = "", **given: Any) -> Any:
    """An option that a preset may set: the field is ``None`` if it is not given.

    ``unmentioned`` is the value if a preset does not mention the option (default: ``default``).
    """
    text = text or (f"{default:g}" if isinstance(default, float) else str(default))
    given = {"metavar": METAVARS.get(type(default)), "otherwise": default, **given}
    return option(None, allowed, f"(default: {text}, or the preset's)", **given)


def annotated(hint: Any, field: Any) -> Any:
    """The type of a field, annotated for tyro."""
    return Annotated[hint, field.metadata["arg"]]


def declared(options: Class) -> Class:
    """Annotates the fields of a class before it becomes a dataclass."""
    hints = inspect.get_annotations(options)
    for name, field in vars(options).items():
        if isinstance(field, dataclasses.Field) and "arg" in field.metadata:
            hints[name] = annotated(hints[name], field)
    options.__annotations__ = hints
    return options


def flag(name: str) -> str:
    """The name of the option on the command line."""
    return "--" + name.replace("_", "-")


def check(options: Any) -> None:
    """Raises :class:`UserError` for a value that is not allowed, or where there is none of many."""
    for field in dataclasses.fields(options):
        value, allowed = getattr(options, field.name), field.metadata.get("allowed")
        if value is None or allowed is None:
            continue
        if value == ():
            raise UserError(f"{flag(field.name)}: no value is given; give one or several.")
        for one in value if isinstance(value, tuple) else (value,):
            if not allowed.has(one):
                text = f"{one:g}" if isinstance(one, float) else one
                raise UserError(f"{flag(field.name)} {text}: {allowed.remedy}.")
