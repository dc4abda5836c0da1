"""The settings of a run as a table: what would be trained, and where each value is from."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from sam_optax.experiments.reporting import table, words


def print_settings(console: Console, description: Mapping[str, Any]) -> None:
    """Prints what all methods share, then what each method has of its own, and the notes."""
    found = table.ruled()
    for column in ("setting", "value", "from"):
        found.add_column(column)
    rows = [("", name, setting) for name, setting in description["settings"].items()]
    for method in description["methods"]:
        rows += [(f"{method['name']}: ", name, s) for name, s in method["settings"].items()]
        rows += [
            (f"{method['name']}: ", name, {"value": value, "source": method["sources"][name]})
            for name, value in method["hyperparameters"].items()
        ]
    for prefix, name, setting in rows:
        cells = prefix + name.replace("_", " "), words.plain(setting["value"]), setting["source"]
        found.add_row(*(Text(words.printable(cell)) for cell in cells))
    console.print(found)
    for note in description["notes"]:
        console.print(Text(note), soft_wrap=True)
