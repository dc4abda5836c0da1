"""Files that are written completely or not at all, in directories for one process at a time."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import filelock

from sam_optax.experiments.errors import UserError

MARK, _LOCK = ".sam_optax", ".sam_optax.lock"
"""A file by which a run knows a directory as its own, and that of the process that writes there."""
_OTHER = "choose another directory"


@contextlib.contextmanager
def claimed(
    path: Path, names: Sequence[str], ours: bool = False, mark: str = MARK
) -> Iterator[None]:
    """Claims a directory for results.

    Entering creates it with its parents, marks it, which fails before any work is done if it is not
    writable, and removes unfinished files of killed processes. A directory with files of the
    ``names`` that are to be written and without the command's ``mark`` (or ``ours``) is refused, as
    are links and folders of these names. Leaving removes directories that it created, if empty.
    """
    lock = filelock.FileLock(path / _LOCK, timeout=0)
    with writable(path):
        there = [path / name for name in names if os.path.lexists(path / name)]
        for of in (*there, path / mark, path / _LOCK):
            if of.is_symlink() or of.is_dir():
                raise UserError(f"--out: {of} is a link or a folder; remove it, or choose another.")
        if there and not (ours or (path / mark).exists()):
            raise UserError(
                f"--out: {there[0]} was not written by this command; choose another directory, or "
                "move the file."
            )
        created = [of for of in (path, *path.parents) if not of.exists()]
    try:
        with writable(path):
            path.mkdir(parents=True, exist_ok=True)
            _acquire(lock, path)
            for name in names:
                for partial in path.glob(f".{name}.[0-9]*.partial"):
                    partial.unlink()
            _write(path / mark, b"")
        yield
    finally:
        if lock.is_locked:
            # Removed before the lock is released, while only this process can hold it.
            Path(lock.lock_file).unlink(missing_ok=True)
            lock.release()
        if path.is_dir() and os.listdir(path) == [mark]:
            (path / mark).unlink()
        for of in created:
            with contextlib.suppress(OSError):  # not empty: contains other files
                of.rmdir()


def _acquire(lock: filelock.BaseFileLock, path: Path) -> None:
    try:
        lock.acquire()
    except filelock.Timeout as error:
        raise UserError(
            f"--out {path}: another process is writing there; wait for it or choose another "
            "directory."
        ) from error
    except PermissionError:
        raise
    except (OSError, NotImplementedError):  # go on without a lock if the file system has none
        Path(lock.lock_file).unlink(missing_ok=True)


@contextlib.contextmanager
def writable(path: Path, remedy: str = _OTHER) -> Iterator[None]:
    """Turns an error of the file system into one of the user's option."""
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"--out {path}: cannot be written to ({reason}); {remedy}.") from error


def write(folder: Path, files: Mapping[str, bytes], remedy: str = _OTHER) -> None:
    """Writes all files next to their targets first, then renames them in the given order."""
    partials = {folder / name: folder / f".{name}.{os.getpid()}.partial" for name in files}
    with writable(folder, remedy):
        try:
            for partial, content in zip(partials.values(), files.values(), strict=True):
                _write(partial, content)
            for target, partial in partials.items():
                os.replace(partial, target)
        finally:
            for partial in partials.values():
                partial.unlink(missing_ok=True)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
