"""Files that are written completely or not at all."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import filelock

from sam_optax.experiments.errors import UserError

MARK, _LOCK = ".sam_optax", ".sam_optax.lock"
"""A file by which a run knows a directory as its own, and that of the process that writes there."""


class OutputDirectory:
    """A directory for results, as a context manager, for one process at a time.

    Entering creates it with its parents, checks that it is writable before any work is done, and
    removes unfinished files of killed processes. With ``names``, patterns of the files that are to
    be written, it marks the directory, and refuses one with such files and without the mark (or
    ``ours``). Links are refused. Leaving with an exception removes the directories that entering
    created, if they are still empty.
    """

    def __init__(self, path: Path, names: Iterable[str] = (), ours: bool = False) -> None:
        self.path, self._names, self._ours = path, tuple(names), ours
        self._created: list[Path] = []
        self._lock = filelock.FileLock(path / _LOCK, timeout=0)

    def __enter__(self) -> Self:
        with writable(self.path, self.__exit__):
            self._check()
            self._created = [of for of in (self.path, *self.path.parents) if not of.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            self._acquire()
            _write(_partial(self.path / "probe"), b"")
            for partial in self.path.glob(".*.[0-9]*.partial"):
                partial.unlink()
            if self._names:
                _write(self.path / MARK, b"")
        return self

    def __exit__(self, error: object, *more: object) -> None:
        if self._lock.is_locked:
            # Removed before the lock is released, while only this process can hold it.
            Path(self._lock.lock_file).unlink(missing_ok=True)
            self._lock.release()
        if error and self.path.is_dir() and os.listdir(self.path) == [MARK]:
            (self.path / MARK).unlink()
        for path in self._created if error else ():
            with contextlib.suppress(OSError):  # not empty: contains other files
                path.rmdir()

    def _check(self) -> None:
        """Raises :class:`UserError` for files that are not ours to replace."""
        there = [of for name in self._names for of in sorted(self.path.glob(name))]
        for of in (*there, self.path / MARK, self.path / _LOCK):
            if of.is_symlink():
                raise UserError(f"--out: {of} is a symbolic link; remove it, or choose another.")
        if there and not (self._ours or (self.path / MARK).exists()):
            raise UserError(
                f"--out: {there[0]} was not written by this command; choose another directory, or "
                "move the file."
            )

    def write(self, files: Mapping[str, bytes]) -> None:
        """Writes files as :func:`replace_files` does."""
        with writable(self.path):
            replace_files({self.path / name: content for name, content in files.items()})

    def _acquire(self) -> None:
        try:
            self._lock.acquire()
        except filelock.Timeout as error:
            raise UserError(
                f"--out {self.path}: another process is writing there; wait for it or choose "
                "another directory."
            ) from error
        except PermissionError:
            raise
        except (OSError, NotImplementedError):  # go on without a lock if the file system has none
            Path(self._lock.lock_file).unlink(missing_ok=True)


@contextlib.contextmanager
def writable(path: Path, failed: Any = lambda error: None) -> Iterator[None]:
    """Turns an error of the file system into one of the user's option."""
    try:
        yield
    except OSError as error:
        failed(error)
        reason = (error.strerror or str(error)).lower()
        raise UserError(
            f"--out {path}: cannot be written to ({reason}); choose another directory."
        ) from error


def check_file(path: Path | None) -> None:
    """Raises :class:`UserError` before any work if a file of ``--out`` cannot be written."""
    if path is not None and not path.parent.is_dir():
        raise UserError(f"--out: {path.parent} is not a folder.")
    if path is not None and path.is_dir():
        raise UserError(f"--out: {path} is a folder, not a file.")


def replace_files(files: Mapping[Path, bytes]) -> None:
    """Writes all files next to their targets first, then renames them in the given order."""
    partials = {target: _partial(target) for target in files}
    try:
        for target, content in files.items():
            _write(partials[target], content)
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


def _partial(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}.partial")
