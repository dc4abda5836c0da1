"""Files that appear complete or not at all."""

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from sam_optax.experiments.errors import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


class OutputDirectory:
    """A directory for results, as a context manager, for one process at a time.

    Entering creates the directory and proves that it can be written to, before any work whose
    results would be lost; it takes away what killed processes left unfinished. Leaving with an
    exception takes unfinished files away, and the directories that entering created if they are
    still empty.

    Args:
      path: the directory; its parents are created too.

    Raises:
      UserError: (on entering or writing) the directory cannot be created or written to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._created: list[Path] = []
        self._lock: int | None = None

    def __enter__(self) -> "OutputDirectory":
        try:
            self._create(self.path)
            _write(_partial(self.path / "probe"), b"")
            _partial(self.path / "probe").unlink()
            self._lock = _lock(self.path)
            for partial in self.path.glob(_partial_name("*", "[0-9]*")):
                partial.unlink()
        except BlockingIOError as error:
            raise UserError(
                f"--out {self.path}: another process is writing there; wait for it or choose "
                "another directory."
            ) from error
        except OSError as error:
            self._remove_created()
            raise self._user_error(error) from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._remove_created()
        if self._lock is not None:
            os.close(self._lock)

    def write(self, files: Mapping[str, bytes]) -> None:
        """Writes files as :func:`replace_files` does."""
        try:
            replace_files({self.path / name: content for name, content in files.items()})
        except OSError as error:
            raise self._user_error(error) from error

    def _create(self, path: Path) -> None:
        if not path.is_dir():
            if path.parent != path:
                self._create(path.parent)
            path.mkdir()
            self._created.append(path)

    def _remove_created(self) -> None:
        for path in reversed(self._created):
            try:
                path.rmdir()
            except OSError:  # not empty: somebody else's files
                return

    def _user_error(self, error: OSError) -> UserError:
        reason = (error.strerror or str(error)).lower()
        return UserError(
            f"--out {self.path}: cannot be written to ({reason}); choose another directory."
        )


def replace_files(files: Mapping[Path, bytes]) -> None:
    """Writes all files beside their targets first, then renames them in the order given.

    Raises:
      OSError: one cannot be written.
    """
    partials = {target: _partial(target) for target in files}
    try:
        for target, content in files.items():
            _write(partials[target], content)
        for target, partial in partials.items():
            os.replace(partial, target)
    finally:
        for partial in partials.values():
            partial.unlink(missing_ok=True)


def _lock(directory: Path) -> int | None:
    """Keeps other processes from writing to a directory until this one ends, however it ends.

    Returns:
      A file descriptor to close, or ``None`` where the platform cannot lock a directory.

    Raises:
      BlockingIOError: another process has it.
    """
    if fcntl is None:
        return None
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return descriptor


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _partial(target: Path) -> Path:
    return target.with_name(_partial_name(target.name, str(os.getpid())))


def _partial_name(name: str, process: str) -> str:
    return f".{name}.{process}.partial"
