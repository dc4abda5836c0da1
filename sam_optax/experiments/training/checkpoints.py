"""Checkpoints of unfinished runs, written by Orbax, with checks of the run they belong to."""

import contextlib
import functools
import hashlib
import json
import logging
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from sam_optax.experiments.errors import UserError
from sam_optax.experiments.named import line
from sam_optax.experiments.training import identity
from sam_optax.experiments.types import Json, PyTree, Record

_NAME, _UNFINISHED = "sam_optax_v3", ".orbax-checkpoint-tmp"
"""A checkpoint is a directory ``sam_optax_v3_EPOCH``, where 3 is the version of the format, and has
this suffix while it is written. Whatever has another name is not ours and is left alone."""

# What Orbax also raises, it logs at length, and again in its threads.
logging.getLogger("absl").setLevel(logging.CRITICAL)
_hook = sys.unraisablehook
sys.unraisablehook = lambda of: None if "loop is closed" in str(of.exc_value) else _hook(of)


class Checkpoints:
    """The last checkpoint of a run.

    It is written synchronously: writing in the background would disturb the timing. ``epoch`` is
    its epoch, 0 without one, and ``every`` the number of epochs between two.
    """

    def __init__(self, path: Path, every: int, run: Json, versions: Json) -> None:
        self.path, self.every, self.epoch = path.absolute(), every, 0
        self._run: Record = {"identity": run, "versions": versions}
        self._found: tuple[Record, list[np.ndarray]] = {}, []

    @functools.cached_property
    def _manager(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(
            max_to_keep=1, step_prefix=_NAME, enable_async_checkpointing=False
        )
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)  # that cannot read below "[a]"
        return ocp.CheckpointManager(self.path, options=options, item_handlers=handler)

    def _ours(self) -> bool:
        return not self.path.is_symlink() and any(self.path.glob(f"{_NAME}_*"))

    def _epochs(self) -> list[int]:
        """Those of the checkpoints, the newest first; Orbax is not asked where none is ours."""
        return sorted(self._manager.all_steps(), reverse=True) if self._ours() else []

    def refuse(self, foreign: bool) -> None:
        """Raises :class:`UserError` if a checkpoint or, with ``foreign``, anything is there."""
        if self._epochs():
            raise UserError(
                f"--out: {self.path} is the checkpoint of an unfinished run; add --resume to "
                "continue that run, remove the directory to start again, or choose another --out."
            )
        link, taken = self.path.is_symlink(), self.path.is_file() or any(self.path.glob("*"))
        if foreign and (link or taken) and not self._ours():
            kind = "a symbolic link" if link else "not a directory of this version's checkpoints"
            raise UserError(f"--out: {self.path} is {kind}; move it, or choose another --out.")

    def find(self) -> list[str]:
        """Reads the checkpoint, if there is one; returns notes for the user.

        It raises :class:`UserError` if the checkpoint is damaged, or of another run.
        """
        epochs = self._epochs()
        if not epochs:
            return []
        try:
            run, arrays = self._read(epochs[0])
        except Exception as error:  # damaged files raise many types
            raise self._unusable(f"the checkpoint is damaged: {line(error)}") from error
        identity.check(run["identity"], self._run["identity"], f"{self.path} is of")
        self.epoch, self._found = epochs[0], (run["record"], arrays)
        was, now = run["versions"], self._run["versions"]
        new = [f"{k} {was.get(k)} (now {v})" for k, v in now.items() if v != was.get(k)]
        numbers = "the numbers may differ a little from those of an uninterrupted run."
        return [f"The checkpoint was written with {', '.join(new)}: {numbers}"] if new else []

    def _read(self, epoch: int) -> tuple[Record, list[np.ndarray]]:
        """Reads a checkpoint; any error is raised if it has changed since it was written."""
        run = dict(self._manager.metadata(epoch).custom_metadata)
        plain = [ocp.RestoreArgs(restore_type=np.ndarray) for _ in range(run["arrays"])]
        arrays = self._manager.restore(epoch, args=ocp.args.PyTreeRestore(restore_args=plain))
        if run.pop("sha256", "") != _sha256(run, arrays):
            raise ValueError("its contents have changed since it was written")
        return run, arrays

    def restore(self, like: PyTree) -> tuple[Record, PyTree]:
        """Record and arrays of the checkpoint found by :meth:`find`.

        The arrays must have the structure, shapes and dtypes of ``like``, and get its shardings.
        """
        (record, arrays), self._found = self._found, ({}, [])
        flat, structure = jax.tree.flatten(like)
        needed = [(of.shape, of.dtype) for of in map(_plain, flat)]
        if [(of.shape, of.dtype) for of in arrays] != needed:
            raise self._unusable("its arrays are not those of this version's training")
        return record, jax.tree.unflatten(structure, map(_like, arrays, flat))

    def save(self, epoch: int, record: Record, arrays: PyTree) -> None:
        """Writes a checkpoint, then removes the one before; a failure is a UserError."""
        state = [_plain(leaf) for leaf in jax.tree.leaves(arrays)]
        run = {**self._run, "record": record, "arrays": len(state)}
        run["sha256"] = _sha256(run, state)
        try:
            self._manager.save(epoch, args=ocp.args.PyTreeSave(state), custom_metadata=run)
        except (OSError, ValueError) as error:  # tensorstore raises ValueError for a full disk
            then = f"continue from epoch {self.epoch}" if self.epoch else "start again"
            raise UserError(
                f"--checkpoint-every: {self.path} cannot be written ({line(error)}). Fix "
                f"the cause; --resume will {then}."
            ) from error
        self.epoch = epoch

    def finish(self) -> None:
        """Removes what is ours, and no other file, after the results have been written."""
        for epoch in self._epochs():
            # Renamed first: a kill must not leave half a checkpoint in the place of a whole one.
            (self.path / f"{_NAME}_{epoch}").rename(self.path / f"{_NAME}_{epoch}{_UNFINISHED}")
        for path in self.path.glob(f"{_NAME}_*{_UNFINISHED}"):
            shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):  # there are other files
            self.path.rmdir()

    def _unusable(self, why: str) -> UserError:
        remedy = "Remove it to start again, or choose another --out."
        return UserError(f"--resume: {self.path} cannot be used: {why}. {remedy}")


def _sha256(run: Json, arrays: Sequence[Any]) -> str:
    """The digest of a checkpoint: the file formats do not detect every flipped bit."""
    digest = hashlib.sha256(json.dumps(run).encode())
    for leaf in arrays:
        digest.update(np.ascontiguousarray(leaf).view(np.uint8).data)
    return digest.hexdigest()


def _plain(leaf: jax.Array) -> jax.Array:
    """An array as Orbax writes it: of a typed key, its integer data."""
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def _like(found: np.ndarray, leaf: jax.Array) -> jax.Array:
    """What was written of an array, as that array is: with its sharding, and a typed key again."""
    placed = jax.device_put(found, _plain(leaf).sharding)
    is_key = placed.dtype != leaf.dtype
    return jax.random.wrap_key_data(placed, impl=jax.random.key_impl(leaf)) if is_key else placed
