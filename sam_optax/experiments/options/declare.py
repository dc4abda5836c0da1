"""Declaration of options, each with its help, default and allowed values."""

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from sam_optax.experiments.errors import UserError

Rule: TypeAlias = Callable[[Any], str]
"""Of the values of an option: "" for an allowed one, or else what to use instead."""


def suggest(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """The remedy for an unknown name: a similar one, or else all of them."""
    known = [*known]
    if close := difflib.get_close_matches(name, known, 1):
        return f"did you mean {close[0]}?"
    return otherwise or f"use one of {', '.join(known)}."


def one_of(names: Iterable[str]) -> Rule:
    """One of some names."""
    names = tuple(names)
    return lambda value: "" if value in names else f"unknown; {suggest(value, names)}"


def allowed(has: Callable[[Any], object], remedy: str) -> Rule:
    """Values with a property."""
    return lambda value: "" if has(value) else f"{remedy}."


def _integer(least: int) -> Rule:
    """An integer of at least ``least`` that fits into an int32."""

    def rule(value: Any) -> str:
        if hasattr(value, "__index__") and least <= value < 2**31:
            return ""
        of = ", of type int" if isinstance(value, float) else ""
        return f"use an integer of at least {least}, below 2^31{of}."

    return rule


def _number(has: Callable[[float], bool], remedy: str) -> Rule:
    # From Python there may be a text in the place of a number.
    return allowed(lambda value: hasattr(value, "__float__") and has(value), remedy)


NOT_EMPTY = allowed(bool, "is empty; give a name, or leave it out")
COUNT, COUNT_OR_ZERO = _integer(1), _integer(0)
POSITIVE = _number(lambda value: 0 < value < math.inf, "use a number above 0")
NOT_NEGATIVE = _number(lambda value: 0 <= value < math.inf, "use a number of at least 0")
SHARE = _number(lambda value: 0 <= value < 1, "use a number in [0, 1)")


def option(
    default: Any, help: str, allowed: Rule | None = None, metavar: str = "", **more: Any
) -> Any:
    """A field with its help, of which the short help has the first sentence if it is ``basic``.

    ``positional`` values follow the name of the command.
    """
    metadata = {"help": help, "allowed": allowed, "metavar": metavar, **more}
    return dataclasses.field(default=default, metadata=metadata)


def setting(default: Any, *about: Any, **more: Any) -> Any:
    """An option that a preset may set: the field is ``None`` if it is not given."""
    return option(None, *about, otherwise=default, **more)


def flag(name: str) -> str:
    """The name of an option on the command line, such as ``sam.rho`` or ``batch_size``."""
    return "--" + name.replace("_", "-")


def check(options: Any) -> None:
    """Raises :class:`UserError` for a value that is not allowed, or where there is none of many."""
    for field in dataclasses.fields(options):
        value, rule = getattr(options, field.name), field.metadata.get("allowed")
        if value is None or rule is None:
            continue
        if value == ():
            raise UserError(f"{flag(field.name)}: no value is given; give one or several.")
        for one in value if isinstance(value, tuple) else (value,):
            if remedy := rule(one):
                text = f"{one:g}" if isinstance(one, float) else one
                given = f"{flag(field.name)} {text}".rstrip()
                raise UserError(f"{given}: {remedy}")
