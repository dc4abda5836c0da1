"""What may reach a terminal: printable text, on a stream that may be closed or full."""

import contextlib
import io
import os
from typing import Any, TextIO


def printable(text: str, keep: str = "") -> str:
    """The text with a ``?`` for each character that is neither printable nor in ``keep``.

    Among these are the escape sequences of terminals, and undecodable bytes of paths.
    """
    return "".join(c if c.isprintable() or c in keep else "?" for c in text)


class Stream:
    """A text stream of which the first failed write is the last: the work goes on without it.

    Attributes:
      error: why nothing is written any more, or ``None``.
    """

    def __init__(self, stream: TextIO | None) -> None:
        # Python has None for a closed descriptor.
        self._stream = stream or io.TextIOWrapper(io.BytesIO(), "utf-8")
        self.error = None if stream else OSError("closed")

    def write(self, text: str) -> int:
        """Writes the text, with a ``?`` for what the encoding lacks."""
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._try(self._stream.write, text.encode(encoding, "replace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        """Flushes the stream."""
        self._try(self._stream.flush)

    def _try(self, call: Any, *args: str) -> None:
        if self.error is not None:
            return
        try:
            call(*args)
        except (OSError, ValueError) as error:
            self.error = error if isinstance(error, OSError) else OSError(str(error))
            # What is buffered would fail again when the interpreter exits.
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as null:
                os.dup2(null.fileno(), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
