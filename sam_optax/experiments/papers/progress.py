"""What a run shows on its way: images per second, and the time that is left."""

from rich.console import Console

from sam_optax.experiments import progress

_MEMORY = 0.9
"""Weight of what was measured before in the running mean of the speed."""


class Progress(progress.Bar):
    """Shows epochs.

    Args:
      console: where to.
      epochs: in all.
      steps: in an epoch.
      batch_size: images in a step.
    """

    def __init__(self, console: Console, epochs: int, steps: int, batch_size: int) -> None:
        self._epochs, self._steps, self._batch_size = epochs, steps, batch_size
        self._seconds: float | None = None
        super().__init__(console, "compiling", epochs * steps)

    def steps(self, done: int, count: int, seconds: float) -> None:
        """``count`` steps took so long; ``done`` are done in all."""
        each = seconds / count
        old = self._seconds
        self._seconds = each if old is None else _MEMORY * old + (1 - _MEMORY) * each
        epoch = -(-done // self._steps)
        speed = self._batch_size / self._seconds
        left = (self._epochs * self._steps - done) * self._seconds
        self.show(f"epoch {epoch}/{self._epochs}, {rate(speed)} images/s, {_time(left)} left", done)

    def epoch(self, epoch: int, loss: float, accuracy: float) -> None:
        """An epoch is over."""
        text = f"epoch {epoch}/{self._epochs}: training loss {loss:.3f}"
        self._console.print(f"{text}, test accuracy {100 * accuracy:.2f} %", soft_wrap=True)


def rate(value: float) -> str:
    """A number of images per second."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
