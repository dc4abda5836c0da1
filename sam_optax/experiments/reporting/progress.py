"""Progress of the work, and the remaining time."""

import importlib.util
import math
import os
import time
from collections.abc import Mapping
from typing import Self

import rich.console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

from sam_optax.experiments.reporting.words import duration

Work = Mapping[str, tuple[float, int]]
"""Kind -> (cost of a piece, in any unit; number of pieces)."""
_KNOWN = 0.05
"""Share of the work to be done before a remaining time is named."""
_LINE_EVERY = 10.0
"""Minimum of seconds between lines if there is no terminal to draw a bar on."""


class Progress:
    """A bar on a terminal and in a notebook; elsewhere a line per phase and tenth of the work.

    The text names the kind of a piece and counts all pieces; with ``epochs`` it counts these, and
    the kind ``"sharpness"`` is a separate phase.
    """

    def __init__(
        self,
        console: rich.console.Console,
        work: Work,
        phase: str = "training",
        epochs: int | None = None,
    ) -> None:
        self._console, self._work, self._main, self._epochs = console, dict(work), phase, epochs
        self._finished = dict.fromkeys(work, 0.0)  # pieces, including those of an earlier process
        self._bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.percentage:3.0f} %"),
            TextColumn("{task.fields[left]}"),
            console=console,
            disable=not can_draw(console),
            speed_estimate_period=math.inf,  # a piece may take hours
        )
        total = sum(cost * count for cost, count in work.values())
        self._task = self._bar.add_task("starting", total=total, left="")
        self._before, self._phases, self._tenth, self._printed = 0.0, {""}, 0, -math.inf

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def compiling(self, what: str, number: int, count: int) -> None:
        """Program ``number`` of ``count`` (from 1) is being compiled."""
        self._show("compiling", f" {what} ({number} of {count})")

    def more(self, kind: str, count: int) -> None:
        """Adds pieces of work."""
        cost, before = self._work[kind]
        self._work[kind] = cost, before + count
        self._bar.update(self._task, total=(self._bar.tasks[0].total or 0) + cost * count)

    def resumed(self, pieces: Mapping[str, int]) -> None:
        """Records the pieces of each kind that an earlier process has done."""
        for kind, count in pieces.items():
            self._add(kind, count)
        self._before = self._bar.tasks[0].completed
        self._show("resuming", f" after {self._position()}")

    def done(self, kind: str, seconds: float, share: float = 1.0) -> None:
        """Records a finished piece of the work, or a share of one."""
        self._add(kind, share)
        if self._epochs is not None and kind == "sharpness":
            self._show("measuring sharpness")
        else:
            of = "" if self._epochs is not None else f" {kind}"
            self._show(self._main, f"{of}, {self._position()}")

    def _add(self, kind: str, pieces: float) -> None:
        self._finished[kind] += pieces
        self._bar.advance(self._task, self._work[kind][0] * pieces)

    def _position(self) -> str:
        if self._epochs is None:
            total = sum(count for _, count in self._work.values())
            return f"{_whole(sum(self._finished.values()))} of {total}"
        epochs = max(n for kind, n in self._finished.items() if kind != "sharpness")
        return f"epoch {min(_whole(epochs), self._epochs)} of {self._epochs}"

    def _show(self, phase: str, details: str = "") -> None:
        task, left = self._bar.tasks[0], ""
        total = task.total or 0.0
        known = task.completed - self._before >= _KNOWN * (total - self._before)
        if known and (seconds := task.time_remaining) is not None:
            left = f"{duration(seconds)} left"
        self._bar.update(self._task, description=phase + details, left=left)
        now, tenth = time.monotonic(), int(task.percentage / 10)
        later = tenth > self._tenth and now - self._printed >= _LINE_EVERY
        if self._bar.disable and (phase not in self._phases or later):
            line = f"{phase}{details}: {task.percentage:.0f} % done{left and f', {left}'}"
            self._console.print(Text(line), soft_wrap=True)
            self._phases.add(phase)
            self._tenth, self._printed = tenth, now


def can_draw(console: rich.console.Console) -> bool:
    """Whether the cursor can be moved: with ``FORCE_COLOR``, rich treats files as terminals."""
    if console.is_jupyter:  # rich uses widgets there
        return importlib.util.find_spec("ipywidgets") is not None
    dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
    return console.is_terminal and console.file.isatty() and not dumb


def _whole(pieces: float) -> int:
    """The number of the current piece; shares add up except for rounding."""
    return math.ceil(pieces - 1e-6)
