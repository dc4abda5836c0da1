"""The methods of the experiments, built in or of a user's file."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from sam_optax.experiments import named
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.methods import builtin
from sam_optax.experiments.methods.method import Method
from sam_optax.experiments.options.declare import suggest

METHODS = {of.name: of for of in vars(builtin).values() if isinstance(of, Method)}
"""Those built in, by name."""
DEFAULT = ("sgd", "sam", "asam", "rsam", "fsam")


def rule(name: Any, others: Sequence[str] = ()) -> str:
    """For a known name or the place of a method "", or else what to use instead."""
    known, more = [*METHODS, *others], "More are in notebooks/methods.py, given as FILE.py:NAME."
    allowed = name in known or named.is_spec(str(name))
    return "" if allowed else f"unknown; {suggest(str(name), known)} {more}"


def get(name: str, option: str = "--methods") -> Method:
    """A method by its name, or the place of its function: FILE.py:NAME or package.module:NAME.

    Raises:
      UserError: (it names the option) there is none.
    """
    if remedy := rule(name):
        raise UserError(f"{option} {name}: {remedy}")
    if name in METHODS:
        return METHODS[name]
    # A file is executed anew where it has changed; a cell of a notebook may have.
    return _found(name, option, named.sha256([name], option) or object())


@functools.lru_cache
def _found(place: str, option: str, version: object) -> Method:
    found = named.find(place, option)
    if not isinstance(found, Method):
        what = f"{option} {place}: is of type {type(found).__name__}"
        raise UserError(f"{what}; give a function under @method(...), of sam_optax.experiments.")
    return dataclasses.replace(found, name=named.short(place))
