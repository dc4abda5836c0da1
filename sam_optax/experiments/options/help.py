"""The help of ``compare``: what most need, everything, or what a method has."""

import dataclasses
import inspect
from typing import Any

from rich.table import Table
from rich.text import Text

from sam_optax.experiments.errors import UserError
from sam_optax.experiments.methods.registry import METHODS
from sam_optax.experiments.options.declare import flag, suggest
from sam_optax.experiments.options.options import FIELDS, Compare
from sam_optax.experiments.reporting.console import Console
from sam_optax.experiments.reporting.words import plain

_EXAMPLES = """examples:
  python -m sam_optax compare
  python -m sam_optax compare --model net.py:Net --dataset npz:data.npz --tune --out runs/first
  python -m sam_optax compare --methods sgd sam --sam.rho 0.05 0.1 0.2 --epochs 20"""
_MORE = "--help-all shows all options, --help METHOD those of a method, such as --sam.rho."


def asked(arguments: list[str]) -> bool:
    """Prints the help that the arguments ask for, if they do."""
    if "--help-all" in arguments:
        _print(basic=False)
    elif {"-h", "--help"} & set(arguments):
        place = next(i for i, a in enumerate(arguments) if a in ("-h", "--help"))
        if (name := "".join(arguments[place + 1 : place + 2])) and not name.startswith("-"):
            _of_method(name)
        else:
            _print(basic=True)
    else:
        return False
    return True


def _print(basic: bool) -> None:
    rows = [
        (f"{flag(name)} {field.metadata['metavar']}", _text(field, basic))
        for name, field in FIELDS.items()
        if name != "hyperparameters" and (field.metadata.get("basic") or not basic)
    ]
    console = Console(markup=False)
    console.print("usage: python -m sam_optax compare [options]\n")
    for paragraph in (inspect.getdoc(Compare) or "").split("\n\n"):
        console.print(" ".join(paragraph.split()) + "\n")
    console.print(_table(rows))
    if basic:
        titles = ", ".join(METHODS)
        console.print(f"\nmethods: {titles}\n\n{_EXAMPLES}\n\n{_MORE}")
    else:
        console.print(f"\n{_MORE}\n\nmethods:")
        console.print(_table([(name, method.title) for name, method in METHODS.items()]))


def _text(field: "dataclasses.Field[Any]", basic: bool) -> str:
    of = field.metadata
    text = of.get("short", of["help"]) if basic else of["help"]
    default = of.get("otherwise", field.default)
    if default is None or default is False or "default:" in text:
        return text
    return f"{text.rstrip('.')} (default: {plain(default)})."


def _of_method(name: str) -> None:
    if name not in METHODS:
        raise UserError(f"--help {name}: unknown method; {suggest(name, METHODS)}")
    method = METHODS[name]
    console = Console(markup=False)
    console.print(f"{name}: {method.title}; each option takes one or several values\n")
    rows = [
        (f"--{name.replace('_', '-')}.{option.replace('_', '-')}", _default(help, default))
        for option, (default, help, _) in method.options.items()
    ]
    console.print(_table(rows) if rows else "It has no hyperparameters of its own.")


def _default(help: str, default: Any) -> str:
    text = "that of sam_optax" if default is None else plain(default)
    return f"{help.rstrip('.')} (default: {text})."


def _table(rows: list[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(max_width=30)
    table.add_column()
    for left, right in rows:
        table.add_row(Text(f"  {left}"), Text(right))
    return table
