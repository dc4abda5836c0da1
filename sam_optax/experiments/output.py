"""Files that appear complete or not at all."""

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from sam_optax.experiments.errors import UserError


class OutputDirectory:
    """A directory for results, as a context manager.

    Entering creates the directory and proves that it can be written to, before any work whose
    results would be lost. Leaving with an exception takes unfinished files away, and the
    directories that entering created if they are still empty.

    Args:
      path: the directory; its parents are created too.

    Raises:
      UserError: (on entering or writing) the directory cannot be created or written to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._created: list[Path] = []

    def __enter__(self) -> "OutputDirectory":
        try:
            self._create(self.path)
            self._write(_partial(self.path / "probe"), b"")
            _partial(self.path / "probe").unlink()
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

    def write(self, files: Mapping[str, bytes]) -> None:
        """Writes all files beside their targets first, then renames them in the order given."""
        partials = {_partial(self.path / name): self.path / name for name in files}
        try:
            for (partial, _), content in zip(partials.items(), files.values(), strict=True):
                self._write(partial, content)
            for partial, target in partials.items():
                os.replace(partial, target)
        except OSError as error:
            raise self._user_error(error) from error
        finally:
            for partial in partials:
                partial.unlink(missing_ok=True)

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

    def _write(self, path: Path, content: bytes) -> None:
        with path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def _user_error(self, error: OSError) -> UserError:
        reason = (error.strerror or str(error)).lower()
        return UserError(
            f"--out {self.path}: cannot be written to ({reason}); choose another directory."
        )


def _partial(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}.partial")
