"""The arguments of a command, and its help, from the fields of its options."""

import argparse
import dataclasses
import functools
import inspect
import os
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from sam_optax.experiments.errors import UserError
from sam_optax.experiments.methods import registry
from sam_optax.experiments.named import is_spec
from sam_optax.experiments.options.declare import flag, option, suggest
from sam_optax.experiments.reporting.words import plain
from sam_optax.experiments.types import Json, Record

Options = TypeVar("Options")
Declared: TypeAlias = Mapping[str, "dataclasses.Field[Any]"]
"""The options of a command by name, which is that of a field, or METHOD.HYPERPARAMETER."""
_KINDS = {int: "an INT", float: "a FLOAT", bool: "True|False", str: "a NAME", Path: "a PATH"}
_EXAMPLES = """examples:
  python -m sam_optax compare
  python -m sam_optax compare --model net.py:Net --dataset npz:data.npz --tune
  python -m sam_optax compare --methods sgd sam --sam.rho 0.05 0.1 0.2"""
_MORE = "--help-all shows all options, --help METHOD those of a method, as --sam.rho."


def parse(command: type[Options], given: Sequence[str], program: str) -> Options:
    """The options of a command from its arguments.

    Raises:
      UserError: an option is unknown, or its value is missing, not allowed or of another type.
    """
    see = f"(see {program} --help)"
    try:
        methods = _parser({k: of for k, of in known(command).items() if k == "methods"})
        asked, _ = methods.parse_known_args(given)
        declared = known(command, vars(asked).get("methods", ()))
        found, unknown = _parser(declared).parse_known_args(given)
    except argparse.ArgumentError as error:
        raise UserError(f"{error.argument_name}: {error.message}. {see}") from error
    for name in (argument.partition("=")[0] for argument in unknown):
        hint = suggest(name, map(flag, declared), "leave it out.")
        raise UserError(f"{name}: unknown option; {hint} {see}")
    return command(**collected(vars(found)))


def collected(values: Json) -> Record:
    """The fields of the options: those named METHOD.HYPERPARAMETER are together in one."""
    given = {name: tuple(of) if isinstance(of, list) else of for name, of in values.items()}
    found = {name: of for name, of in given.items() if "." not in name}
    more = {name: of for name, of in given.items() if "." in name}
    return {**found, "hyperparameters": more} if more else found


def known(command: type, methods: Sequence[str] = ()) -> Declared:
    """All options of a command; hyperparameters of methods, if it has them, take several values.

    Those of the given methods of files take the place of others of their names.
    """
    fields = {of.name: of for of in dataclasses.fields(command)}
    found = {name: of for name, of in fields.items() if "help" in of.metadata}
    if "hyperparameters" not in fields:
        return found
    of_files = (registry.get(name) for name in methods if is_spec(name))
    for name, method in {of.name: of for of in (*registry.METHODS.values(), *of_files)}.items():
        for hyperparameter, parameter in method.options.items():
            default = "that of the method" if parameter.default is None else parameter.default
            kind, text = typing.get_args(parameter.annotation)
            of = found[f"{name}.{hyperparameter}"] = option(default, text)
            of.type = types.GenericAlias(tuple, (kind, ...))
    return found


def print_help(command: type, given: Sequence[str], program: str) -> bool:
    """Prints the help that the arguments ask for, if they do: short, of all, or of a method.

    A command with a short help names the options of it in ``BASIC``.
    """
    asked = [i for i, one in enumerate(given) if one in ("-h", "--help", "--help-all")]
    if not asked:
        return False
    declared, about, names, more = known(command), inspect.getdoc(command), "", ""
    shown = {name: of for name, of in declared.items() if "." not in name}
    short = getattr(command, "BASIC", "").split()
    method = "".join(given[asked[0] + 1 : asked[0] + 2])
    if short and "--help-all" in given:
        lines = "\n".join(f"  {name:18}{of.title}" for name, of in registry.METHODS.items())
        short, more = [], f"\n{_MORE}\n\nmethods:\n{lines}"
    elif short and method and not method.startswith("-"):
        found = registry.get(method, "--help")
        declared = known(command, [method])
        shown = {name: of for name, of in declared.items() if name.startswith(f"{found.name}.")}
        short, about = [], f"{method}: {found.title}"
    elif short:
        shown = {name: shown[name] for name in short}
        names = f"methods: {', '.join(registry.METHODS)}, or FILE.py:NAME"
        more = f"\n{_EXAMPLES}\n\n{_MORE}"
    texts = {"usage": f"{program} [options]", "description": about, "epilog": names}
    print(_parser(shown, bool(short), **texts).format_help() + more)
    return True


def _parser(declared: Declared, short: bool = False, **texts: Any) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        **texts,
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=functools.partial(argparse.HelpFormatter, max_help_position=30),
    )
    for name, field in declared.items():
        (kind, several), about = _kind(field.type), field.metadata
        how: dict[str, Any] = {"nargs": "*"} if several else {}
        if field.type is bool:
            how["action"] = "store_true"
        else:
            how["type"] = functools.partial(_value, kind)
            how["metavar"] = about["metavar"] or _KINDS[kind].split()[-1]
        parser.add_argument(flag(name), help=_text(field, short), **how)
    return parser


def _kind(hint: Any) -> tuple[type, bool]:
    """The type of a value, and whether an option has several."""
    if not (inner := typing.get_args(hint)):
        return hint, False
    kind, several = _kind(inner[0])  # of ``X | None``, or of ``tuple[X, ...]``
    return kind, several or typing.get_origin(hint) is tuple


def _value(kind: type, text: str) -> Any:
    if not text:  # which would be the current directory
        raise argparse.ArgumentTypeError("is empty; give a value, or leave it out")
    try:
        if kind is bool:
            return {"True": True, "False": False}[text]
        return kind(os.path.expanduser(text))  # shells leave ``~`` alone in --out=~/runs
    except (KeyError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"use {_KINDS[kind]}, not {text}") from error


def _text(field: "dataclasses.Field[Any]", short: bool) -> str:
    text = field.metadata["help"]
    if short:
        text = text.partition(". ")[0].rstrip(".") + "."
    default = field.metadata.get("otherwise", field.default)
    known = default is not None and default is not False and default != ()
    if known and "default:" not in text:
        shown = " ".join(map(plain, default if isinstance(default, tuple) else [default]))
        text = f"{text.rstrip('.')} (default: {shown})."
    return text.replace("%", "%%")
