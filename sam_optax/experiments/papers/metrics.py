"""What is measured after each epoch, and the files that it goes to."""

import json
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sam_optax.experiments.errors import UserError
from sam_optax.experiments.papers import records

Point = Mapping[str, float]
"""Numbers by name, ``epoch`` and ``step`` among them."""


class Metrics:
    """The points of a run, in ``metrics.jsonl`` and, if asked for, in a file for TensorBoard.

    TensorBoard's file is a sequence of small messages, which are written here: its package would
    bring a web server along.

    Args:
      out: the directory; ``None`` keeps them in memory only.
      tensorboard: whether to write TensorBoard's file, too.
      earlier: the points of an earlier process that this one continues.
    """

    def __init__(self, out: Path | None, tensorboard: bool, earlier: Sequence[Point] = ()) -> None:
        self.points = list(earlier)
        self._files: list[tuple[Path, Any]] = []
        if out is not None:
            self._open(out / "metrics.jsonl", b"", _line)
            if tensorboard:
                for old in out.glob("events.out.tfevents.*"):
                    old.unlink()
                name = f"events.out.tfevents.{int(time.time())}.sam_optax"
                start = _double(1, time.time()) + _bytes(3, b"brain.Event:2")
                self._open(out / name, records.frame(start), _event)

    def _open(self, path: Path, start: bytes, encode: Any) -> None:
        try:
            path.write_bytes(start + b"".join(map(encode, self.points)))
        except OSError as error:
            raise _unwritable(path, error) from error
        self._files.append((path, encode))

    def add(self, point: Point) -> None:
        """Keeps a point and appends it to the files."""
        self.points.append(point)
        for path, encode in self._files:
            try:
                with path.open("ab") as file:
                    file.write(encode(point))
            except OSError as error:
                raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> UserError:
    reason = (error.strerror or str(error)).lower()
    return UserError(
        f"--out: {path} cannot be written ({reason}); put that right, or choose another directory."
    )


def _line(point: Point) -> bytes:
    return json.dumps(point).encode() + b"\n"


def _event(point: Point) -> bytes:
    """A message of TensorBoard's.

    Event    { double wall_time = 1; int64 step = 2; Summary summary = 5 }
    Summary  { repeated Value value = 1 }
    Value    { string tag = 1; float simple_value = 2 }
    """
    values = b"".join(
        _bytes(1, _bytes(1, name.encode()) + struct.pack("<Bf", 2 << 3 | 5, value))
        for name, value in point.items()
        if name not in ("step", "epoch")
    )
    step = _varint(2 << 3) + _varint(int(point["step"]))
    return records.frame(_double(1, time.time()) + step + _bytes(5, values))


def _double(field: int, value: float) -> bytes:
    return struct.pack("<Bd", field << 3 | 1, value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
