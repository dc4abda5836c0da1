"""Declaration of options, each with its help, default and allowed values."""

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from sam_optax.experiments.errors import UserError
from sam_optax.experiments.reporting.words import plain

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


def choice(*names: str) -> dict[str, Any]:
    """What an option declares whose value is one of a few names."""
    return {"allowed": one_of(names), "metavar": "|".join(names)}


def allowed(has: Callable[[Any], object], remedy: str) -> Rule:
    """Values with a property."""
    return lambda value: "" if has(value) else f"{remedy}."


def _number(has: Callable[[Any], bool], remedy: str, kind: str = "__float__") -> Rule:
    # From Python there may be a text in the place of a number.
    return allowed(lambda value: hasattr(value, kind) and has(value), remedy)


def _integer(least: int) -> Rule:
    remedy = f"use an integer (int) of at least {least}, below 2^31"
    return _number(lambda value: least <= value < 2**31, remedy, "__index__")


COUNT, COUNT_OR_ZERO = _integer(1), _integer(0)
POSITIVE = _number(lambda value: 0 < value < math.inf, "use a number above 0")
NOT_NEGATIVE = _number(lambda value: 0 <= value < math.inf, "use a number of at least 0")
SHARE = _number(lambda value: 0 <= value < 1, "use a number in [0, 1)")


def option(
    default: Any, help: str, allowed: Rule | None = None, metavar: str = "", **more: Any
) -> Any:
    """A field with its help; see ``arguments`` for what follows from it.

    An option that ``needs`` another one has no effect without it.
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
    """Raises :class:`UserError` for a value that is not allowed, missing or without effect."""
    fields = {field.name: field.metadata for field in dataclasses.fields(options)}
    for name, about in fields.items():
        value, rule, needed = getattr(options, name), about.get("allowed"), about.get("needs")
        if value == ():
            raise UserError(f"{flag(name)}: no value is given; give one or several.")
        for one in value if isinstance(value, tuple) else (value,):
            if one == "":
                raise UserError(f"{flag(name)}: is empty; give a value, or leave it out.")
            if rule and one is not None and (remedy := rule(one)):
                raise UserError(f"{flag(name)} {plain(one)}: {remedy}")
        if needed and value and not getattr(options, needed):
            what = f"{flag(needed)} {fields[needed]['metavar']}".rstrip()
            raise UserError(f"{flag(name)}: needs {what}; add it, or leave this out.")


def check_once(name: str, values: Sequence[Any] | None) -> None:
    """Raises :class:`UserError` if an option is given without values, or with one of them twice."""
    if values == ():
        raise UserError(f"{flag(name)}: no value is given; give one or several.")
    if values and len({*values}) < len(values):
        text = " ".join(map(plain, values))
        raise UserError(f"{flag(name)} {text}: a value is given twice; give each once.")
