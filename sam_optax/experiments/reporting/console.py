"""The terminal: everything that a command prints goes through here."""

import os
import sys
from collections.abc import Iterable
from typing import Any

import rich.console
from rich.segment import Segment
from rich.text import Text

from sam_optax.experiments.reporting.stream import Stream, printable


class Console(rich.console.Console):
    """A console to which names from outside are plain text, and which never fails.

    Tables, progress and lines may contain names of files, columns or methods: what could control
    the terminal is replaced. The width of a file is 100 unless ``COLUMNS`` is set.
    """

    def __init__(self, stderr: bool = False, **options: Any) -> None:
        stream = sys.stderr if stderr else sys.stdout
        if stream is None or not (stderr or stream.isatty() or "COLUMNS" in os.environ):
            options = {"width": 100, **options}
        plain: Any = {"highlight": False, "markup": False}
        super().__init__(**{"file": Stream(stream), **plain, **options})

    def render(self, *args: Any, **options: Any) -> Iterable[Segment]:
        """The segments of a renderable."""
        for text, style, control in super().render(*args, **options):
            yield Segment(text if control else printable(text, "\n"), style, control)


def say(message: str, stderr: bool = True) -> None:
    """Prints a line, which only a terminal wraps."""
    Console(stderr).print(Text(message), soft_wrap=True)
