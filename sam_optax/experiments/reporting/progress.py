"""Progress of the work, and the remaining time estimated from measurements."""

import collections
import importlib.util
import math
import os
import time
from collections.abc import Mapping
from typing import Self

import numpy as np
import rich.progress
from rich.console import Console
from rich.text import Text

from sam_optax.experiments.reporting.words import duration

Work = Mapping[str, tuple[float, int]]
"""Kind -> (prior cost of a piece, in any unit; number of pieces)."""
_RECENT = 10
"""Number of recent pieces per kind in the estimate, so that it follows a changing load."""
_LINE_EVERY = 10.0
"""Seconds between lines if there is no terminal to draw a bar on."""


class Estimate:
    """The remaining time, for work of several kinds of pieces.

    The cost of a kind is its recent mean. A kind without measurements costs its prior times the
    rate of the measured kinds. Compilation is not a piece: it ends before the first one starts.
    """

    def __init__(self, work: Work) -> None:
        self._work = dict(work)
        self.finished = dict.fromkeys(work, 0.0)  # pieces, including those of an earlier process
        self.remaining: float | None = None  # seconds, once a piece is done
        recent = collections.deque[tuple[float, float]]
        self._recent = {kind: recent(maxlen=_RECENT) for kind in work}

    def done(self, kind: str, seconds: float, share: float = 1.0) -> None:
        """Records a piece, or a share of one."""
        self.finished[kind] += share
        self._recent[kind].append((seconds, share))
        measured = {k: np.sum(times, axis=0) for k, times in self._recent.items() if times}
        prior = sum(self._work[k][0] * pieces for k, (_, pieces) in measured.items())
        rate = sum(seconds for seconds, _ in measured.values()) / prior
        self.remaining = 0.0
        for k, (cost, count) in self._work.items():
            each = measured[k][0] / measured[k][1] if k in measured else cost * rate
            self.remaining += max(0.0, each * (count - self.finished[k]))

    def more(self, kind: str, count: int) -> None:
        """Adds pieces of work."""
        self._work[kind] = self._work[kind][0], self._work[kind][1] + count

    @property
    def fraction(self) -> float:
        """Share of the work that is done, by prior cost."""
        total = sum(cost * count for cost, count in self._work.values())
        return sum(self._work[kind][0] * n for kind, n in self.finished.items()) / total


class Progress:
    """A bar on a terminal and in a notebook; elsewhere a line per phase and at intervals.

    The text names the kind of a piece and counts all pieces; with ``epochs`` it counts these, and
    the kind ``"sharpness"`` is a separate phase.
    """

    def __init__(
        self, console: Console, work: Work, phase: str = "training", epochs: int | None = None
    ) -> None:
        self._console, self._estimate = console, Estimate(work)
        self._main, self._epochs = phase, epochs
        self._pieces = sum(count for _, count in work.values())
        self._phase, self._last_line = "", -math.inf
        self._drawn = can_draw(console)
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}", markup=False),
            rich.progress.BarColumn(),
            rich.progress.TextColumn("{task.percentage:3.0f} %"),
            rich.progress.TextColumn("{task.fields[left]}"),
            console=console,
            disable=not self._drawn,
        )
        self._task = self._bar.add_task("starting", total=1.0, left="")

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
        self._estimate.more(kind, count)
        self._pieces += count

    def resumed(self, pieces: Mapping[str, int]) -> None:
        """Records the pieces of each kind that an earlier process has done."""
        for kind, count in pieces.items():
            self._estimate.finished[kind] += count
        self._show("resuming", f" after {self._position()}")

    def done(self, kind: str, seconds: float, share: float = 1.0) -> None:
        """Records a finished piece of the work, or a share of one."""
        self._estimate.done(kind, seconds, share)
        if self._epochs is not None and kind == "sharpness":
            self._show("measuring sharpness")
        else:
            of = "" if self._epochs is not None else f" {kind}"
            self._show(self._main, f"{of}, {self._position()}")

    def _position(self) -> str:
        finished = self._estimate.finished
        if self._epochs is None:
            return f"{_whole(sum(finished.values()))} of {self._pieces}"
        epochs = max(n for kind, n in finished.items() if kind != "sharpness")
        return f"epoch {min(_whole(epochs), self._epochs)} of {self._epochs}"

    def _show(self, phase: str, details: str = "") -> None:
        fraction, seconds = self._estimate.fraction, self._estimate.remaining
        left = "time left not known yet" if seconds is None else f"{duration(seconds)} left"
        self._bar.update(self._task, description=phase + details, completed=fraction, left=left)
        now = time.monotonic()
        if not self._drawn and (phase != self._phase or now - self._last_line >= _LINE_EVERY):
            line = f"{phase}{details}: {100 * fraction:.0f} % done, {left}"
            self._console.print(Text(line), soft_wrap=True)
            self._last_line = now
        self._phase = phase


def can_draw(console: Console) -> bool:
    """Whether the cursor can be moved: with ``FORCE_COLOR``, rich treats files as terminals."""
    if console.is_jupyter:  # rich uses widgets there
        return importlib.util.find_spec("ipywidgets") is not None
    dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
    return console.is_terminal and console.file.isatty() and not dumb


def _whole(pieces: float) -> int:
    """The number of the current piece; shares add up except for rounding."""
    return math.ceil(pieces - 1e-6)
