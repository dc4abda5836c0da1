"""What TensorBoard shows while the training runs."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sam_optax.experiments.reporting.output import writable
from sam_optax.experiments.types import Function


@contextlib.contextmanager
def live(logs: Path, epochs: int) -> Iterator[Function]:
    """``add(method, seed, epoch, metrics)``: a point of ``METHOD/seed_SEED`` in a folder.

    A run that goes on after so many ``epochs`` takes the place of later points.
    """
    from tensorboardX import SummaryWriter  # only on request; missing: before the training

    writers: dict[tuple[str, int], Any] = {}
    with writable(logs):
        for other in () if epochs else logs.glob("*/*/events.out.tfevents.*"):
            other.unlink()  # of an earlier run, maybe with other methods

    def add(method: str, seed: int, epoch: int, metrics: Mapping[str, float]) -> None:
        with writable(logs):
            if (key := (method, seed)) not in writers:
                folder = str(logs / method / f"seed_{seed}")
                # flush() does not wait for the writer's thread, which has the last points.
                writers[key] = SummaryWriter(folder, purge_step=epochs + 1, flush_secs=1)
            for name, value in metrics.items():
                if math.isfinite(value):
                    writers[key].add_scalar(name, value, epoch)
            writers[key].flush()  # raises here where the disk is full

    try:
        yield add
    finally:
        for writer in writers.values():
            writer.close()
