"""Writes the measurements of each epoch as soon as they are known."""

import contextlib
import json
from pathlib import Path
from typing import Any, Self

from sam_optax.experiments.reporting.output import writable
from sam_optax.experiments.reporting.results import number
from sam_optax.experiments.types import Json


class Live:
    """``metrics.jsonl``, with one line per epoch, method and seed.

    Lines of an earlier process are kept for the ``epochs`` in its checkpoint. On request
    ``tensorboard/METHOD/seed_SEED`` is written too.
    """

    def __init__(self, out: Path, tensorboard: bool = False, epochs: int = 0) -> None:
        self._path, self._epochs = out / "metrics.jsonl", epochs
        self._logs = out / "tensorboard" if tensorboard else None
        self._writers: dict[Path, Any] = {}

    def __enter__(self) -> Self:
        with writable(self._path):
            before = self._path.read_bytes().splitlines() if self._path.exists() else []
            self._path.write_bytes(b"")
            for old in self._logs.glob("*/*/events.out.tfevents.*") if self._logs else ():
                old.unlink()
            for line in before:
                # The last one may be incomplete after a kill, and others of another tool.
                with contextlib.suppress(ValueError, TypeError, KeyError):
                    if (point := json.loads(line))["epoch"] <= self._epochs:
                        self._write(**point)
        return self

    def __exit__(self, *error: object) -> None:
        for writer in self._writers.values():
            writer.close()
        if not self._path.stat().st_size:
            self._path.unlink()  # interrupted before the first epoch: leave nothing

    def add(self, method: str, seed: int, epoch: int, metrics: Json) -> None:
        """Writes the numbers of an epoch (counted from 1), with null for non-finite values."""
        with writable(self._path):
            self._write(method, seed, epoch, **{name: number(x) for name, x in metrics.items()})

    def _write(self, method: str, seed: int, epoch: int, **numbers: float | None) -> None:
        point = {"method": method, "seed": seed, "epoch": epoch, **numbers}
        with self._path.open("ab") as file:
            file.write(json.dumps(point).encode() + b"\n")
        if self._logs is None:
            return
        from tensorboardX import SummaryWriter  # only on request

        logs = self._logs / method / f"seed_{seed}"
        if logs not in self._writers:
            self._writers[logs] = SummaryWriter(str(logs))
        for name, value in numbers.items():
            if value is not None:
                self._writers[logs].add_scalar(name, value, epoch)
        self._writers[logs].flush()
