"""Progress of the work, and the remaining time."""

import importlib.util
import math
import time
from collections.abc import Mapping
from datetime import timedelta

import rich.console
import rich.progress
from rich.progress import BarColumn, TextColumn
from rich.text import Text

Work = Mapping[str, tuple[float, int]]
"""Kind -> (cost of a piece, in any unit; number of pieces)."""
_KNOWN = 0.05
"""Share of the work to be done before a remaining time is named."""
_LINE_EVERY = 10.0
"""Minimum of seconds between lines if there is no terminal to draw a bar on."""


class Progress(rich.progress.Progress):
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
        texts = "{task.description}", "{task.percentage:3.0f} %", "{task.fields[left]}"
        name, *numbers = (TextColumn(text, markup=False) for text in texts)
        # A piece may take hours, so that the speed is that of the whole run.
        super().__init__(
            *(name, BarColumn(), *numbers),
            console=console,
            disable=not can_draw(console),
            speed_estimate_period=math.inf,
        )
        self._work, self._main, self._epochs = work, phase, epochs
        self._done = dict.fromkeys(work, 0.0)  # pieces, including those of an earlier process
        total = sum(cost * count for cost, count in work.values())
        self.add_task("starting", total=total, left="")
        [self._task] = self.tasks
        self._before, self._phases, self._tenth, self._printed = 0.0, {""}, 0, -math.inf

    def compiling(self, what: str, number: int, count: int) -> None:
        """Program ``number`` of ``count`` (from 1) is being compiled."""
        self._show("compiling", f" {what} ({number} of {count})")

    def resumed(self, pieces: Mapping[str, int]) -> None:
        """Records the pieces of each kind that an earlier process has done."""
        for kind, count in pieces.items():
            self._add(kind, count)
        self._before = self._task.completed
        self._show("resuming", f" after {self._position()}")

    def done(self, kind: str, share: float = 1.0) -> None:
        """Records a finished piece of the work, or a share of one."""
        self._add(kind, share)
        if self._epochs is None:
            self._show(self._main, f" {kind}, {self._position()}")
        elif kind == "sharpness":
            self._show("measuring sharpness")
        else:
            self._show(self._main, f", {self._position()}")

    def _add(self, kind: str, pieces: float) -> None:
        self._done[kind] += pieces
        self.advance(self._task.id, self._work[kind][0] * pieces)

    def _position(self) -> str:
        # Shares of a piece add up except for rounding.
        if self._epochs is None:
            count = math.ceil(sum(self._done.values()) - 1e-6)
            return f"{count} of {sum(count for _, count in self._work.values())}"
        epochs = max(n for kind, n in self._done.items() if kind != "sharpness")
        return f"epoch {min(math.ceil(epochs - 1e-6), self._epochs)} of {self._epochs}"

    def _show(self, phase: str, details: str = "") -> None:
        task, seconds = self._task, self._task.time_remaining
        known = task.completed - self._before >= _KNOWN * ((task.total or 0) - self._before)
        left = f"{timedelta(seconds=seconds)} left" if known and seconds is not None else ""
        self.update(task.id, description=phase + details, left=left)
        now, tenth = time.monotonic(), int(task.percentage / 10)
        later = tenth > self._tenth and now - self._printed >= _LINE_EVERY
        if self.disable and (phase not in self._phases or later):
            line = f"{phase}{details}: {task.percentage:.0f} % done{left and f', {left}'}"
            self.console.print(Text(line), soft_wrap=True)
            self._phases.add(phase)
            self._tenth, self._printed = tenth, now


def can_draw(console: rich.console.Console) -> bool:
    """Whether the cursor can be moved: with ``FORCE_COLOR``, rich treats files as terminals."""
    if console.is_jupyter:  # rich uses widgets there
        return importlib.util.find_spec("ipywidgets") is not None
    return console.is_terminal and console.file.isatty() and not console.is_dumb_terminal
