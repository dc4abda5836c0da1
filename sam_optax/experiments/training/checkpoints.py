"""Checkpoints of unfinished runs, written by Orbax, with checks of the run they belong to."""

import contextlib
import errno
import functools
import hashlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from sam_optax.experiments.errors import UserError
from sam_optax.experiments.training import identity
from sam_optax.experiments.types import Json, PyTree, Record

FORMAT = "sam_optax.checkpoint"
FORMAT_VERSION = 2
_DAMAGED = "it is damaged: its contents have changed since it was written"


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Suppresses long logs of Orbax and its threads about errors that are also raised."""
    disabled, hook = logging.root.manager.disable, sys.unraisablehook
    logging.disable(logging.CRITICAL)
    sys.unraisablehook = lambda _: None
    try:
        yield
    finally:
        logging.disable(disabled)
    sys.unraisablehook = hook  # threads may still fail after an error


class Checkpoints:
    """The checkpoint of a run; a newer one replaces it.

    It is written synchronously: writing in the background would disturb the timing. ``epoch`` is
    the number of epochs it contains, 0 without a checkpoint, and ``every`` the number of epochs
    between two checkpoints.
    """

    def __init__(self, path: Path, every: int, run: Json, versions: Mapping[str, str]) -> None:
        self.path, self.every, self.epoch = path.absolute(), every, 0
        self._run, self._versions = run, versions
        self._found: Record = {}

    @functools.cached_property
    def _manager(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
        handlers: Any = {
            "state": ocp.StandardCheckpointHandler(),
            "run": ocp.JsonCheckpointHandler(),
        }
        return ocp.CheckpointManager(self.path, options=options, item_handlers=handlers)

    def refuse(self) -> None:
        """Raises :class:`UserError` if there is a checkpoint that a new run would replace."""
        if self.path.exists() and self._manager.latest_step() is not None:
            raise UserError(
                f"--out: {self.path} is the checkpoint of an unfinished run; add --resume to "
                "continue that run, remove the directory to start again, or choose another --out."
            )

    def find(self) -> str | None:
        """Looks for a checkpoint; returns a note for the user, if any.

        Raises:
          UserError: it is damaged, has another format version, or belongs to another run.
        """
        if not self.path.exists():
            if (older := self.path.with_suffix(".msgpack")).exists():
                raise UserError(
                    f"--resume: {older} is the checkpoint of an older version of sam_optax; "
                    "continue with that version, or remove it to start again."
                )
            return None
        with self._reading():
            epoch = self._manager.latest_step()
            if epoch is None:
                return None
            arguments = ocp.args.Composite(run=ocp.args.JsonRestore())
            run = self._manager.restore(epoch, args=arguments)["run"]
            kind = run["format"], run["format_version"]
        if kind != (FORMAT, FORMAT_VERSION):
            raise self._unusable(f"it is of another format, {kind[0]} {kind[1]}")
        if run.pop("sha256", "") != _sha256(json.dumps(run).encode()):
            raise self._unusable(_DAMAGED)
        remedy = "Give the same ones, choose another --out, or remove the directory to start again."
        identity.check(run["identity"], self._run, f"{self.path} is of", remedy)
        self.epoch, self._found = epoch, run
        then, now = run["versions"], self._versions
        changed = [f"{k} {then.get(k)} (now {v})" for k, v in now.items() if then.get(k) != v]
        note = (
            f"The checkpoint was written with {', '.join(changed)}: the numbers may differ a "
            "little from those of an uninterrupted run."
        )
        return note if changed else None

    def restore(self, like: PyTree) -> tuple[Record, PyTree]:
        """Record and arrays of the checkpoint found by :meth:`find`.

        The arrays must have the structure, shapes and dtypes of ``like``, and get its shardings.
        """
        expected = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            for name, leaf in _by_path(like).items()
        }
        with self._reading():
            item = self._manager.item_metadata(self.epoch)["state"]
            self._compare(getattr(item, "tree", item), expected)
            arguments = ocp.args.Composite(state=ocp.args.StandardRestore(expected))
            restored = self._manager.restore(self.epoch, args=arguments)["state"]
        leaves = [restored[name] for name in expected]
        if _sha256(*leaves) != self._found["arrays"]:
            raise self._unusable(_DAMAGED)
        flat, structure = jax.tree.flatten(like)
        arrays = jax.tree.unflatten(structure, map(_as, leaves, flat))
        return self._found["record"], arrays

    def _compare(self, stored: Json, expected: Json) -> None:
        for name in stored.keys() ^ expected.keys():
            where = "only in the checkpoint" if name in stored else "not in the checkpoint"
            raise self._unusable(f"{name} is {where}")
        for name, leaf in expected.items():
            theirs = tuple(stored[name].shape), stored[name].dtype
            if theirs != (leaf.shape, leaf.dtype):
                raise self._unusable(
                    f"{name} is {theirs[1]}{list(theirs[0])} there, and {leaf.dtype}"
                    f"{list(leaf.shape)} in this run"
                )

    @_quietly()
    def save(self, epoch: int, record: Record, arrays: PyTree) -> None:
        """Writes a checkpoint (arrays and plain data) that replaces the previous one.

        Raises:
          UserError: it cannot be written; the previous one is kept.
        """
        state = _by_path(arrays)
        run = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "identity": self._run,
            "versions": self._versions,
            "record": record,
            "arrays": _sha256(*state.values()),
        }
        run["sha256"] = _sha256(json.dumps(run).encode())
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), run=ocp.args.JsonSave(run))
        try:
            self._manager.save(epoch, args=items)
        except (OSError, ValueError) as error:  # tensorstore raises ValueError for a full disk
            then = f"continue from epoch {self.epoch}" if self.epoch else "start again"
            raise UserError(
                f"--checkpoint-every: {self.path} cannot be written ({_line(error)}). Fix "
                f"the cause; --resume will {then}."
            ) from error
        self.epoch = epoch

    def finish(self) -> None:
        """Removes the checkpoint after the results have been written."""
        if "_manager" in self.__dict__:
            self._manager.close()
        if not jax.process_index():
            shutil.rmtree(self.path, ignore_errors=True)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            with _quietly():
                yield
        except UserError:
            raise
        except Exception as error:  # damaged files raise many types
            raise self._unusable(f"it cannot be read ({_line(error)})") from error

    def _unusable(self, why: str) -> UserError:
        return UserError(
            f"--resume: {self.path} cannot be used: {why}. Remove it to start again, or choose "
            "another --out."
        )


def _sha256(*parts: Any) -> str:
    """The digest of bytes or arrays: the file formats do not detect every flipped bit."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else np.ascontiguousarray(part).data)
    return digest.hexdigest()


def _by_path(tree: PyTree) -> dict[str, jax.Array]:
    """The leaves by path, with typed keys as their integer data."""
    return {
        jax.tree_util.keystr(path): jax.random.key_data(leaf) if _is_key(leaf) else leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def _as(restored: jax.Array, leaf: jax.Array) -> jax.Array:
    """The restored array, as a typed key if the leaf is one."""
    impl = jax.random.key_impl(leaf) if _is_key(leaf) else None
    return jax.random.wrap_key_data(restored, impl=impl) if impl else restored


def _is_key(leaf: jax.Array) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _line(error: Exception) -> str:
    """The reason, in a few words; the messages of Orbax's libraries are long."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    reasons = [reason for code in errno.errorcode if (reason := os.strerror(code)) in text]
    if reasons:  # the message of the operating system
        return max(reasons, key=len).lower()
    return text.splitlines()[0][:200].rstrip(".")
