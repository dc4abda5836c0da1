"""The ``tf.train.Example`` messages in TFDS's records, read without TensorFlow.

Example   { Features features = 1 }
Features  { map<string, Feature> feature = 1 }
Feature   { oneof { BytesList = 1, FloatList = 2, Int64List = 3 } }, lists with value = 1
"""

from collections.abc import Iterator

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def parse(message: bytes) -> dict[str, bytes | int]:
    """The first value of each feature: bytes or an integer; lists of floats are left out.

    Raises:
      ValueError: it is no such message.
    """
    values: dict[str, bytes | int] = {}
    for _, features in _fields(message):
        for _, entry in _fields(_as_bytes(features)):
            pair = dict(_fields(_as_bytes(entry)))
            name = _as_bytes(pair[1]).decode()
            for kind, items in _fields(_as_bytes(pair.get(2, b""))):
                for _, item in _fields(_as_bytes(items)):
                    if kind == 1:
                        values[name] = item
                    elif kind == 3:  # packed, or one by one
                        number = item if isinstance(item, int) else _varint(item, 0)[0]
                        values[name] = number - (number >> 63 << 64)
                    break
    return values


def _fields(message: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Number and value of each field; numbers other than varints as bytes."""
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, position = _varint(message, position)
            yield number, value
            continue
        if kind == _BYTES:
            length, position = _varint(message, position)
        elif kind in (_FIXED64, _FIXED32):
            length = 8 if kind == _FIXED64 else 4
        else:
            raise ValueError(f"wire type {kind}")
        if position + length > len(message):
            raise ValueError("cut off")
        yield number, message[position : position + length]
        position += length


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """A variable-length integer and the position after it."""
    value = shift = 0
    while position < len(message):
        byte = message[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position
    raise ValueError("cut off")


def _as_bytes(value: bytes | int) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number in place of a message")
    return value
