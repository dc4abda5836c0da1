"""What a run shows on its way: images per second, and the time that is left."""

import time
from types import TracebackType

import rich.progress
from rich.console import Console

_LINE_EVERY = 10.0
"""Seconds between lines where there is no terminal to draw a bar on."""
_MEMORY = 0.9
"""Weight of what was measured before in the running mean of the speed."""


class Progress:
    """A bar on a terminal, a line now and then elsewhere.

    Args:
      console: where to.
      epochs: in all.
      steps: in an epoch.
      batch_size: images in a step.
    """

    def __init__(self, console: Console, epochs: int, steps: int, batch_size: int) -> None:
        self._console = console
        self._epochs, self._steps, self._batch_size = epochs, steps, batch_size
        self._seconds: float | None = None
        self._line = 0.0
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.TextColumn("{task.percentage:3.0f} %"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("compiling", total=epochs * steps)

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def steps(self, done: int, count: int, seconds: float) -> None:
        """``count`` steps took so long; ``done`` are done in all."""
        each = seconds / count
        old = self._seconds
        self._seconds = each if old is None else _MEMORY * old + (1 - _MEMORY) * each
        epoch = -(-done // self._steps)
        speed = self._batch_size / self._seconds
        left = (self._epochs * self._steps - done) * self._seconds
        self._show(
            f"epoch {epoch}/{self._epochs}, {rate(speed)} images/s, {_time(left)} left", done
        )

    def epoch(self, epoch: int, loss: float, accuracy: float) -> None:
        """An epoch is over."""
        text = f"epoch {epoch}/{self._epochs}: training loss {loss:.3f}"
        self._console.print(f"{text}, test accuracy {100 * accuracy:.2f} %", soft_wrap=True)

    def _show(self, text: str, done: int) -> None:
        self._bar.update(self._task, description=text, completed=done)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._line >= _LINE_EVERY:
            self._console.print(text, soft_wrap=True)
            self._line = now


def rate(value: float) -> str:
    """A number of images per second."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
