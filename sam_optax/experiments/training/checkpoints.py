"""The checkpoint of an unfinished run: one file, with checks of the run that it belongs to."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from flax import serialization

from sam_optax.experiments.errors import UserError
from sam_optax.experiments.reporting.output import replace_files
from sam_optax.experiments.training import identity
from sam_optax.experiments.types import Json, PyTree, Record

FILE = "checkpoint.msgpack"
"""In the directory of --out. It begins with the SHA-256 of the rest, where a flipped bit would
otherwise go unnoticed: the arrays and, as JSON, epoch, identity of the run, versions and record."""


class Checkpoints:
    """The last checkpoint of a run, in a directory.

    ``epoch`` is its epoch, 0 without one, and ``every`` the number of epochs between two.
    """

    def __init__(self, out: Path, every: int, run: Json, versions: Mapping[str, str]) -> None:
        self.path, self.every, self.epoch = out / FILE, every, 0
        self._run, self._versions = run, versions
        self._found: tuple[Record, Mapping[str, np.ndarray]] = {}, {}

    def find(self) -> list[str]:
        """Reads the checkpoint, if there is one; returns notes for the user.

        It raises :class:`UserError` if the checkpoint is damaged, or of another run.
        """
        if not self.path.exists():
            return []
        try:
            content = self.path.read_bytes()
        except OSError as error:
            raise self._unusable(str(error.strerror or error).lower()) from error
        digest, content = content[:32], content[32:]
        if digest != hashlib.sha256(content).digest():
            raise self._unusable("it is damaged, or of another program")
        found = serialization.msgpack_restore(content)
        run = json.loads(found["run"])
        identity.check(run["identity"], self._run, f"{self.path} is of")
        self.epoch, self._found = run["epoch"], (run["record"], found["arrays"])
        was, now = run["versions"], self._versions
        new = [f"{k} {was.get(k)} (now {v})" for k, v in now.items() if v != was.get(k)]
        numbers = "the numbers may differ a little from those of an uninterrupted run."
        return [f"The checkpoint was written with {', '.join(new)}: {numbers}"] if new else []

    def restore(self, like: PyTree) -> tuple[Record, PyTree]:
        """Record and arrays of the checkpoint found by :meth:`find`.

        The arrays must have the structure, shapes and dtypes of ``like``, and get its shardings.
        """
        (record, arrays), self._found = self._found, ({}, {})
        leaves, structure = jax.tree.flatten(like)
        plain = _plain(leaves)
        found, needed = (
            {number: (of.shape, of.dtype) for number, of in each.items()}
            for each in (arrays, plain)
        )
        if found != needed:
            raise self._unusable("its arrays are not those of this version's training")
        for i, (leaf, (number, ours)) in enumerate(zip(leaves, plain.items(), strict=True)):
            read = arrays[number].__getitem__
            leaves[i] = jax.make_array_from_callback(ours.shape, ours.sharding, read)
            if ours is not leaf:
                leaves[i] = jax.random.wrap_key_data(leaves[i], impl=jax.random.key_impl(leaf))
        return record, jax.tree.unflatten(structure, leaves)

    def save(self, epoch: int, record: Record, arrays: PyTree) -> None:
        """Writes a checkpoint in the place of the one before; a failure is a UserError."""
        run = {"identity": self._run, "versions": self._versions, "epoch": epoch, "record": record}
        leaves = jax.device_get(_plain(jax.tree.leaves(arrays)))
        content = serialization.msgpack_serialize({"run": json.dumps(run), "arrays": leaves})
        try:
            if not jax.process_index():  # only one process writes
                replace_files({self.path: hashlib.sha256(content).digest() + content})
        except OSError as error:
            then = f"continue from epoch {self.epoch}" if self.epoch else "start again"
            raise UserError(
                f"--checkpoint-every: {self.path} cannot be written ({error.strerror or error}). "
                f"Fix the cause; --resume will {then}."
            ) from error
        self.epoch = epoch

    def finish(self) -> None:
        """Removes the checkpoint, after the results have been written."""
        if not jax.process_index():
            self.path.unlink(missing_ok=True)

    def _unusable(self, why: str) -> UserError:
        remedy = "Remove it to start again, or choose another --out."
        return UserError(f"--resume: {self.path} cannot be used: {why}. {remedy}")


def _plain(leaves: list[jax.Array]) -> dict[str, jax.Array]:
    """The arrays by number, as they can be written: of a typed key, its integer data."""
    return {
        str(i): jax.random.key_data(leaf)
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        else leaf
        for i, leaf in enumerate(leaves)
    }
