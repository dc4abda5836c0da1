"""The checkpoint of an unfinished comparison: whether there is one, and of which run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sam_optax.experiments import checkpoint_file, identity, results
from sam_optax.experiments.checkpoint_file import UnusableError
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.output import replace_files
from sam_optax.experiments.snapshots import Snapshot


class Checkpoints:
    """The checkpoint of a run; a newer one takes its place.

    It is written before the training goes on: in the background, the writing would disturb the
    times of the steps.

    Args:
      out: the directory of the run's results.
      every: epochs between checkpoints; 0 for none.
      run: the identity of the run.

    Attributes:
      path: the file.
      every: as given.
      epoch: epochs that the checkpoint of this run has done; 0 without one.
    """

    def __init__(self, out: Path, every: int, run: Mapping[str, Any]) -> None:
        self.path = out / "checkpoint.msgpack"
        self.every = every
        self.epoch = 0
        self._identity = run
        self._found: tuple[dict[str, Any], Any] = {}, None

    def refuse(self) -> None:
        """Raises :class:`UserError` if there is a checkpoint, which a new run would replace."""
        if self.path.exists():
            raise UserError(
                f"--out: {self.path} is the checkpoint of an unfinished run; add --resume to "
                "continue that run, remove the file to start again, or choose another directory."
            )

    def find(self) -> str | None:
        """Reads the checkpoint, if there is one.

        Returns:
          What the user should know about it, if anything.

        Raises:
          UserError: it is damaged, of another version of the format, or of another run.
        """
        try:
            run, arrays = checkpoint_file.decode(self.path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._unusable(f"it cannot be read ({_reason(error)})") from error
        except UnusableError as error:
            raise self._unusable(error) from error
        identity.check_checkpoint(self.path, run["identity"], self._identity)
        self.epoch, self._found = run["epoch"], (run, arrays)
        then, now = run["versions"], results.versions()
        changed = [f"{k} {then.get(k)} (now {v})" for k, v in now.items() if then.get(k) != v]
        if not changed:
            return None
        return (
            f"The checkpoint was written with {', '.join(changed)}: the numbers may differ a "
            "little from those of an uninterrupted run."
        )

    def restore(self, like: Any) -> Snapshot:
        """The snapshot that :meth:`find` has found.

        Args:
          like: params and states with the structure, shapes and dtypes to expect.

        Raises:
          UserError: it has others.
        """
        (run, arrays), self._found = self._found, ({}, None)
        try:
            arrays = checkpoint_file.with_structure(arrays, like)
        except UnusableError as error:
            raise self._unusable(error) from error
        return Snapshot(run["epoch"], run["record"], arrays)

    def save(self, snapshot: Snapshot) -> None:
        """Writes a checkpoint in the place of the previous one.

        Raises:
          UserError: it cannot be written; the previous one is still there.
        """
        run = {
            "epoch": snapshot.epoch,
            "identity": self._identity,
            "versions": results.versions(),
            "record": snapshot.record,
        }
        content = checkpoint_file.encode(run, snapshot.arrays)
        try:
            replace_files({self.path: content})
        except OSError as error:
            then = f"continue from epoch {self.epoch}" if self.epoch else "start again"
            raise UserError(
                f"--checkpoint-every: {self.path} cannot be written ({_reason(error)}). Put that "
                f"right; --resume will {then}."
            ) from error
        self.epoch = snapshot.epoch

    def finish(self) -> None:
        """Removes the checkpoint, after the results have been written."""
        self.path.unlink(missing_ok=True)

    def _unusable(self, why: object) -> UserError:
        return UserError(
            f"--resume: {self.path} cannot be used: {why}. Remove it to start again, or choose "
            "another --out."
        )


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
