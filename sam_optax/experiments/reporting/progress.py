"""Progress of the work, and the remaining time."""

import importlib.util
import math
from collections.abc import Mapping
from datetime import timedelta

import rich.console
import rich.progress
from rich.progress import BarColumn, TextColumn
from rich.text import Text


class Progress(rich.progress.Progress):
    """A bar on a terminal and in a notebook; elsewhere a line per phase and tenth of the work.

    The work is of several kinds: kind -> (cost of a piece, in any unit; number of pieces).
    """

    def __init__(self, console: rich.console.Console, work: Mapping[str, tuple[float, int]]):
        # A piece may take hours, so that the speed is that of the whole run.
        super().__init__(
            BarColumn(bar_width=20),
            TextColumn("{task.description}", markup=False),
            console=console,
            disable=not can_draw(console),
            speed_estimate_period=math.inf,
        )
        self._costs = {kind: cost for kind, (cost, _) in work.items()}
        self.add_task("starting", total=sum(map(math.prod, work.values())))
        [self._task] = self.tasks
        self._doing, self._printed = "", ("", 0)

    def show(self, doing: str) -> None:
        """Says what is being done, such as "training, epoch 3 of 60"; its first word is a phase."""
        self._doing = doing
        self._advance(0.0)

    def done(self, kind: str, share: float = 1.0) -> None:
        """Records a finished piece of the work, or a share of one."""
        self._advance(self._costs[kind] * share)

    def _advance(self, cost: float) -> None:
        self.update(self._task.id, advance=cost)
        percent, seconds = self._task.percentage, self._task.time_remaining
        text = f"{self._doing}: {percent:.0f} %"
        if seconds is not None and 5 <= percent < 99.5:  # before that it would be a guess
            text += f", {timedelta(seconds=seconds)} left"
        self.update(self._task.id, description=text)
        phase = self._doing.partition(" ")[0], int(percent / 10)
        if self.disable and phase != self._printed:
            self.console.print(Text(text), soft_wrap=True)
            self._printed = phase


def can_draw(console: rich.console.Console) -> bool:
    """Whether the cursor can be moved: with ``FORCE_COLOR``, rich treats files as terminals."""
    if console.is_jupyter:  # rich uses widgets there
        return importlib.util.find_spec("ipywidgets") is not None
    return console.is_terminal and console.file.isatty() and not console.is_dumb_terminal
