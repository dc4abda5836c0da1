"""Text as bytes: parts of a text, or pairs of a text and its translation."""

import os

import numpy as np

from sam_optax.experiments.data.images import Examples, Raw
from sam_optax.experiments.errors import UserError

SEPARATOR, END = 0xFE, 0xFF
"""Bytes that UTF-8 does not use: between the texts of a pair, and after the second one."""
TOKENS = 256
LENGTH = 64
"""Bytes of an example of a text by default."""
_NO_LABEL = -1


def load(kind: str, path: str, length: int | None) -> Raw:
    """Reads ``text:PATH`` or ``pairs:PATH``, of which the last tenth is held out for testing.

    An example of a text is ``length`` bytes, labelled with the byte after each. That of a pair is
    source, ``SEPARATOR`` and target, of which only the bytes of the target and its ``END`` are
    labels.
    """
    content = _read(path)
    x, y, notes = (_text if kind == "text" else _pairs)(content, length)
    if len(x) < 2:
        other = "smaller" if kind == "text" else "larger"
        raise UserError(
            f"it has {len(x)} examples of {x.shape[1]} bytes; use a longer file, or a {other} "
            "--length."
        )
    n = len(x) - max(1, len(x) // 10)
    notes.append("The last tenth of the data is held out for testing.")
    return Raw(Examples(x[:n], y[:n]), Examples(x[n:], y[n:]), TOKENS, tuple(notes))


def decoded(tokens: np.ndarray) -> str:
    """The text of some tokens up to ``END``."""
    return bytes(tokens.tolist()).partition(bytes([END]))[0].decode(errors="replace")


def _read(path: str) -> str:
    if not path:
        from pydoc_data.topics import topics  # the text of help()

        return "\n".join(topics.values())
    try:
        with open(os.path.expanduser(path), encoding="utf-8-sig") as file:
            return file.read()
    except OSError as error:
        raise UserError(f"cannot be read ({(error.strerror or str(error)).lower()}).") from error
    except UnicodeDecodeError as error:
        raise UserError(f"is not UTF-8 ({error.reason}); convert it, as with iconv.") from error


def _text(content: str, length: int | None) -> tuple[np.ndarray, np.ndarray, list[str]]:
    tokens = np.frombuffer(content.encode(), np.uint8).astype(np.int32)
    size = length or LENGTH
    n = max(0, len(tokens) - 1) // size
    x, y = (tokens[start : start + n * size].reshape(n, size) for start in (0, 1))
    return x, y, []


def _pairs(content: str, length: int | None) -> tuple[np.ndarray, np.ndarray, list[str]]:
    found = []
    for number, line in enumerate(content.split("\n"), 1):
        row = line.split("\t")
        if not line.strip():
            continue
        if len(row) != 2 or not all(row):
            raise UserError(
                f"line {number} has {len(row)} columns{', one empty' * (len(row) == 2)}; use two, "
                "source<TAB>target."
            )
        source, target = (text.encode() for text in row)
        found.append((len(source), [*source, SEPARATOR, *target, END]))
    sizes = [len(tokens) - 1 for _, tokens in found]
    limit = length or max(sizes, default=0)
    kept = [pair for pair, own in zip(found, sizes, strict=True) if own <= limit]
    size = max((own for own in sizes if own <= limit), default=limit)
    x = np.full((len(kept), size), END, np.int32)
    y = np.full((len(kept), size), _NO_LABEL, np.int32)
    for i, (start, tokens) in enumerate(kept):
        x[i, : len(tokens) - 1] = tokens[:-1]
        y[i, start : len(tokens) - 1] = tokens[start + 1 :]
    longer = len(found) - len(kept)
    note = f"{longer} pairs of more than {limit} bytes (--length) are left out."
    return x, y, [note] if longer else []
