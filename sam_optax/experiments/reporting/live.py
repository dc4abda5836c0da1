"""What TensorBoard shows while the training runs."""

import math
from pathlib import Path
from typing import Any, Self

from sam_optax.experiments.reporting.output import writable


class Live:
    """``METHOD/seed_SEED`` in the folder ``logs``, with a point after each epoch.

    A run that goes on after so many ``epochs`` takes the place of later points.
    """

    def __init__(self, logs: Path, epochs: int) -> None:
        self._logs, self._epochs = logs, epochs
        self._writers: dict[tuple[str, int], Any] = {}

    def __enter__(self) -> Self:
        from tensorboardX import SummaryWriter  # only on request; missing: before the training

        self._writer = SummaryWriter
        with writable(self._logs):
            for other in () if self._epochs else self._logs.glob("*/*/events.out.tfevents.*"):
                other.unlink()  # of an earlier run, maybe with other methods
        return self

    def __exit__(self, *error: object) -> None:
        for writer in self._writers.values():
            writer.close()

    def add(self, method: str, seed: int, epoch: int, metrics: dict[str, float]) -> None:
        """Writes the numbers of an epoch (counted from 1) that are finite."""
        with writable(self._logs):
            if (key := (method, seed)) not in self._writers:
                folder = self._logs / method / f"seed_{seed}"
                # flush() does not wait for the writer's thread, which has the last points.
                self._writers[key] = self._writer(
                    str(folder), purge_step=self._epochs + 1, flush_secs=1
                )
            for name, value in metrics.items():
                if math.isfinite(value):
                    self._writers[key].add_scalar(name, value, epoch)
            self._writers[key].flush()  # raises here where the disk is full
