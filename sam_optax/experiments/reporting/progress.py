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

_KNOWN = 0.05
"""Share of the work to be done before a remaining time is named."""
_LINE_EVERY = 10.0
"""Minimum of seconds between lines if there is no terminal to draw a bar on."""


class Progress(rich.progress.Progress):
    """A bar on a terminal and in a notebook; elsewhere a line per phase and tenth of the work.

    The work is of several kinds: kind -> (cost of a piece, in any unit; number of pieces).
    """

    def __init__(self, console: rich.console.Console, work: Mapping[str, tuple[float, int]]):
        # A piece may take hours, so that the speed is that of the whole run.
        super().__init__(
            *(BarColumn(bar_width=20), TextColumn("{task.description}", markup=False)),
            console=console,
            disable=not can_draw(console),
            speed_estimate_period=math.inf,
        )
        self._costs = {kind: cost for kind, (cost, _) in work.items()}
        self.add_task("starting", total=sum(map(math.prod, work.values())))
        [self._task] = self.tasks
        self._doing, self._before, self._last = "", 0.0, ("", 0, -math.inf)

    def show(self, doing: str) -> None:
        """Says what is being done, such as "training, epoch 3 of 60"; its first word is a phase."""
        self._doing = doing
        self._update(0.0)

    def resumed(self, pieces: Mapping[str, int]) -> None:
        """Records the pieces of each kind that an earlier process has done."""
        self._before = sum(self._costs[kind] * count for kind, count in pieces.items())
        self.advance(self._task.id, self._before)

    def done(self, kind: str, share: float = 1.0) -> None:
        """Records a finished piece of the work, or a share of one."""
        self._update(self._costs[kind] * share)

    def _update(self, cost: float) -> None:
        self.update(self._task.id, advance=cost)
        task, seconds, now = self._task, self._task.time_remaining, time.monotonic()
        known = task.completed - self._before >= _KNOWN * ((task.total or 0) - self._before)
        left = f", {timedelta(seconds=seconds)} left" if known and seconds is not None else ""
        text = f"{self._doing}: {task.percentage:.0f} % done{left}"
        self.update(task.id, description=text)
        phase, tenth = self._doing.partition(" ")[0], int(task.percentage / 10)
        before, printed_tenth, printed = self._last
        later = tenth > printed_tenth and now - printed >= _LINE_EVERY
        if self.disable and (phase != before or later):
            self.console.print(Text(text), soft_wrap=True)
            self._last = phase, tenth, now


def can_draw(console: rich.console.Console) -> bool:
    """Whether the cursor can be moved: with ``FORCE_COLOR``, rich treats files as terminals."""
    if console.is_jupyter:  # rich uses widgets there
        return importlib.util.find_spec("ipywidgets") is not None
    return console.is_terminal and console.file.isatty() and not console.is_dumb_terminal
