"""The checkpoints of an unfinished comparison: which there are, and whether they are this run's."""

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from sam_optax.experiments import checkpoint_files, identity, results
from sam_optax.experiments.checkpoint_files import UnreadableError, reason
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.output import probe
from sam_optax.experiments.snapshots import Snapshot

FORMAT = "sam_optax.compare.checkpoint"
FORMAT_VERSION = 1
_COMPLETE = re.compile(r"epoch-(\d+)")
_LEFT_OVER = re.compile(r"epoch-\d+\..+")
"""What was killed while it was written or removed; a complete one loses its name at once."""


class Checkpoints:
    """The checkpoints of a run, of which the newest is kept.

    Args:
      out: the directory of the run's results.
      every: epochs between checkpoints; 0 for none.
      run: the identity of the run.

    Attributes:
      path: the directory of the checkpoints; it exists only as long as there are any.
      every: as given.
      epoch: epochs that the newest checkpoint of this run has done; 0 without one.

    Raises:
      UserError: the directory of the checkpoints is none, or cannot be written to.
    """

    def __init__(self, out: Path, every: int, run: Mapping[str, Any]) -> None:
        self.path = out / "checkpoint"
        self.every = every
        self.epoch = 0
        self._identity = run
        self._run: dict[str, Any] = {}
        try:
            self._clean()
            if self.path.exists():
                probe(self.path)
        except OSError as error:
            raise UserError(
                f"--out: {self.path} cannot be written to ({reason(error)}); remove it or choose "
                "another --out."
            ) from error
        if every:
            import orbax.checkpoint  # noqa: F401 (if it is missing, say so before the training)

    def refuse(self) -> None:
        """Raises :class:`UserError` if there is a checkpoint, which a new run would replace."""
        if epochs := self._epochs():
            raise UserError(
                f"--out: {self.path} holds an unfinished run, after epoch {epochs[-1]}; add "
                "--resume to continue it, remove it to start again, or choose another --out."
            )

    def find(self) -> str | None:
        """Finds the newest checkpoint.

        Returns:
          What the user should know about it, if anything.

        Raises:
          UserError: it is damaged, of another version of the format, or of another run.
        """
        epochs = self._epochs()
        if not epochs:
            return None
        directory = self._directory(epochs[-1])
        try:
            run = checkpoint_files.read_run(directory)
        except UnreadableError as error:
            raise self._unreadable(directory, error) from error
        versions = run.get("versions", {})
        if (run.get("format"), run.get("format_version")) != (FORMAT, FORMAT_VERSION):
            raise UserError(
                f"--resume: {directory} has version {run.get('format_version')} of the format, by "
                f"sam_optax {versions.get('sam_optax')}; this sam_optax reads {FORMAT_VERSION}. "
                f"Continue with that sam_optax, or remove {self.path} to start again."
            )
        if run.get("epoch") != epochs[-1] or not {"identity", "record"} <= run.keys():
            raise self._unreadable(directory, "what it says of itself is wrong")
        if differing := identity.differences(run["identity"], self._identity):
            raise UserError(
                f"--resume: {self.path} holds a run with other settings: {differing}. Give the "
                "same ones, choose another --out, or remove it to start again."
            )
        self.epoch, self._run = epochs[-1], run
        now = results.versions()
        changed = [f"{k} {v} (now {now.get(k)})" for k, v in versions.items() if now.get(k) != v]
        if not changed:
            return None
        return (
            f"The checkpoint was written with {', '.join(changed)}: the numbers may differ a "
            "little from those of an uninterrupted run."
        )

    def save(self, snapshot: Snapshot) -> None:
        """Writes a checkpoint, then removes the previous one.

        Raises:
          UserError: it cannot be written.
        """
        run = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "epoch": snapshot.epoch,
            "identity": self._identity,
            "versions": results.versions(),
            "record": snapshot.record,
        }
        previous = self._epochs()
        target = self._directory(snapshot.epoch)
        try:
            self.path.mkdir(exist_ok=True)
            checkpoint_files.write(target, run, snapshot.arrays)
        except Exception as error:  # there is no telling what a full disk raises
            kept = f"continue from epoch {previous[-1]}" if previous else "start again"
            raise UserError(
                f"--checkpoint-every: {target} cannot be written ({reason(error)}). Put that "
                f"right, then --resume will {kept}."
            ) from error
        finally:
            self._clean()
        self.epoch = snapshot.epoch
        for epoch in previous:
            self._remove(epoch)

    def restore(self, like: Any) -> Snapshot:
        """Reads the checkpoint that :meth:`find` has found.

        Args:
          like: params and states with the structure, shapes and dtypes to expect.

        Raises:
          UserError: it is damaged.
        """
        directory = self._directory(self.epoch)
        try:
            arrays = checkpoint_files.read_arrays(directory, self._run, jax.device_get(like))
        except UnreadableError as error:
            raise self._unreadable(directory, error) from error
        return Snapshot(self.epoch, self._run["record"], arrays)

    def finish(self) -> None:
        """Removes the checkpoints, after the results have been written."""
        for epoch in self._epochs():  # the newest is the last, and whole until then
            self._remove(epoch)
        if self.path.is_dir() and not any(self.path.iterdir()):
            self.path.rmdir()

    def _directory(self, epoch: int) -> Path:
        return self.path / f"epoch-{epoch}"

    def _epochs(self) -> list[int]:
        """The epochs of the complete checkpoints, ascending."""
        if not self.path.is_dir():
            return []
        names = (_COMPLETE.fullmatch(entry.name) for entry in self.path.iterdir())
        return sorted(int(name[1]) for name in names if name)

    def _remove(self, epoch: int) -> None:
        directory = self._directory(epoch)
        os.replace(directory, directory.with_name(f"{directory.name}.removed"))
        self._clean()

    def _clean(self) -> None:
        for entry in self.path.iterdir() if self.path.exists() else ():
            if _LEFT_OVER.fullmatch(entry.name):
                shutil.rmtree(entry)

    def _unreadable(self, directory: Path, error: object) -> UserError:
        return UserError(
            f"--resume: {directory} is damaged or cannot be read ({error}); remove "
            f"{self.path} to start again."
        )
