"""TFRecord files: what TFDS keeps its examples in, and TensorBoard its events.

A record is its length (8 bytes), the masked CRC-32C of these, the data, and their masked CRC-32C.
"""

import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from sam_optax.experiments.errors import UserError

_HEADER = struct.Struct("<QI")
_POLYNOMIAL = 0x82F63B78


def _table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
        table.append(byte)
    return table


_TABLE = _table()


def masked_crc(data: bytes) -> int:
    """The checksum of the format."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def frame(data: bytes) -> bytes:
    """A record with these data."""
    length = struct.pack("<Q", len(data))
    return b"".join(
        (length, struct.pack("<I", masked_crc(length)), data, struct.pack("<I", masked_crc(data)))
    )


def write(path: Path, records: Iterable[bytes]) -> None:
    """Writes a file."""
    path.write_bytes(b"".join(map(frame, records)))


def index(path: Path) -> np.ndarray:
    """Where the records of a file are: int64, (records, 2), offset and length of the data.

    Only the lengths are read. They are checked against their checksums; the data are not.

    Raises:
      UserError: the file is cut off or damaged.
    """
    found: list[tuple[int, int]] = []
    try:
        size, position, opened = path.stat().st_size, 0, path.open("rb", buffering=0)
    except OSError as error:
        raise UserError(f"--dataset: {path} cannot be read ({error.strerror}).") from error
    with opened as file:
        while position < size:
            file.seek(position)
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size:
                raise _damaged(path, len(found))
            length, crc = _HEADER.unpack(header)
            end = position + _HEADER.size + length + 4
            if masked_crc(header[:8]) != crc or end > size:
                raise _damaged(path, len(found))
            found.append((position + _HEADER.size, length))
            position = end
    return np.array(found, np.int64).reshape(-1, 2)


def read(path: Path, offset: int, length: int) -> bytes:
    """The data of a record."""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(length)


def _damaged(path: Path, record: int) -> UserError:
    return UserError(
        f"--dataset: {path} is damaged or cut off at record {record}; prepare the data set again."
    )
