"""The file of ``--out``, for commands that write a single JSON file."""

import json
from pathlib import Path
from typing import Any

from sam_optax.experiments.errors import UserError
from sam_optax.experiments.reporting.output import replace_files


def check(path: Path | None) -> None:
    """Raises :class:`UserError`, before any work, if the file cannot be written."""
    if path is not None and not path.parent.is_dir():
        raise UserError(f"--out: {path.parent} is not a folder.")
    if path is not None and path.is_dir():
        raise UserError(f"--out: {path} is a folder, not a file.")


def write(path: Path, content: Any) -> None:
    """Writes the file in one piece: an interrupt leaves the old file or the new one.

    Raises:
      UserError: the file cannot be written.
    """
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    try:
        replace_files({path: text.encode()})
    except OSError as error:
        raise UserError(f"--out: cannot write {path}: {error.strerror}.") from error
