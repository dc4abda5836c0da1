"""A progress bar whose remaining time comes from what has been measured."""

import collections
import math
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

import rich.progress
from rich.console import Console
from rich.text import Text

_RECENT = 10
"""Pieces of each kind that the estimate looks back on, so that it follows a changing load."""
_LINE_EVERY = 10.0
"""Seconds between lines where there is no terminal to draw a bar on."""


class Estimate:
    """The time left, for work of several kinds of pieces.

    A kind that has been measured costs its recent mean. One that has not costs its prior times
    the rate of what has. Compilation is no piece: it is over before the first one starts.

    Args:
      work: kind -> (prior cost of a piece, in any unit; number of pieces).
      clock: seconds, monotonic.
    """

    def __init__(
        self, work: Mapping[str, tuple[float, int]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._work = dict(work)
        self._clock = clock
        self._done = dict.fromkeys(work, 0)
        self._recent = {kind: collections.deque[float](maxlen=_RECENT) for kind in work}
        self._left: float | None = None
        self._updated = 0.0

    def skip(self, kind: str, count: int) -> None:
        """Records pieces that an earlier process has done. What they took there says little."""
        self._done[kind] += count

    def done(self, kind: str, seconds: float) -> None:
        """Records a piece."""
        self._done[kind] += 1
        self._recent[kind].append(seconds)
        measured = sum(sum(times) for times in self._recent.values())
        prior = sum(self._work[k][0] * len(times) for k, times in self._recent.items())
        left = 0.0
        for k, (cost, count) in self._work.items():
            times = self._recent[k]
            each = sum(times) / len(times) if times else cost * measured / prior
            left += each * (count - self._done[k])
        self._left, self._updated = left, self._clock()

    @property
    def fraction(self) -> float:
        """Share of the work that is done, by prior cost."""
        total = sum(cost * count for cost, count in self._work.values())
        return sum(self._work[kind][0] * n for kind, n in self._done.items()) / total

    @property
    def remaining(self) -> float | None:
        """Seconds left, or ``None`` before the first piece is done."""
        if self._left is None:
            return None
        return max(0.0, self._left - (self._clock() - self._updated))


class Bar:
    """A bar on a terminal, a line now and then elsewhere.

    Args:
      console: where to.
      description: what is going on at first.
      total: what ``show`` counts to.
      columns: further columns of the bar.
    """

    def __init__(
        self,
        console: Console,
        description: str,
        total: float,
        *columns: rich.progress.ProgressColumn,
    ) -> None:
        self._console = console
        self._last_line = -math.inf
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.TextColumn("{task.percentage:3.0f} %"),
            *columns,
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(description, total=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def show(self, text: str, completed: float, line: str | None = None, due: bool = False) -> None:
        """What is going on now, and how much is done.

        Args:
          text: beside the bar.
          completed: so much of ``total``.
          line: what is printed where there is no bar; ``text`` by default.
          due: whether to print it although the last line is recent.
        """
        self._bar.update(self._task, description=text, completed=completed)
        now = time.monotonic()
        if not self._console.is_terminal and (due or now - self._last_line >= _LINE_EVERY):
            self._console.print(text if line is None else line, soft_wrap=True)
            self._last_line = now


class Progress(Bar):
    """Shows an :class:`Estimate`.

    Args:
      console: where to; standard error, so that the table alone is on standard output.
      work: see :class:`Estimate`.
      epochs: pieces of each method.
    """

    def __init__(
        self, console: Console, work: Mapping[str, tuple[float, int]], epochs: int
    ) -> None:
        self._estimate = Estimate(work)
        self._epochs = epochs
        self._rounds: collections.Counter[str] = collections.Counter()
        self._phase = ""
        super().__init__(console, "starting", 1.0, _Remaining(self._estimate))

    def compiling(self, what: str, number: int, count: int) -> None:
        """Program ``number`` of ``count`` (from 1) is being compiled."""
        self._show("compiling", f" {what} ({number} of {count})")

    def resumed(self, pieces: Mapping[str, int]) -> None:
        """So many pieces of each kind were done by an earlier process."""
        for kind, count in pieces.items():
            self._estimate.skip(kind, count)
            self._rounds[kind] += count
        self._show("resuming", f" after epoch {max(self._rounds.values())} of {self._epochs}")

    def done(self, kind: str, seconds: float) -> None:
        """A piece of the work is done."""
        self._estimate.done(kind, seconds)
        self._rounds[kind] += 1
        if kind == "sharpness":
            self._show("measuring sharpness")
        else:
            self._show("training", f", epoch {max(self._rounds.values())} of {self._epochs}")

    def _show(self, phase: str, details: str = "") -> None:
        fraction = self._estimate.fraction
        text = phase + details
        line = f"{text}: {100 * fraction:.0f} % done, {_format(self._estimate.remaining)}"
        self.show(text, fraction, line, due=phase != self._phase)
        self._phase = phase


class _Remaining(rich.progress.ProgressColumn):
    max_refresh = 0.5

    def __init__(self, estimate: Estimate) -> None:
        super().__init__()
        self._estimate = estimate

    def render(self, task: rich.progress.Task) -> Text:
        return Text(_format(self._estimate.remaining))


def _format(seconds: float | None) -> str:
    if seconds is None:
        return "time left not known yet"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d} left"
