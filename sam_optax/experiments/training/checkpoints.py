"""``checkpoint.npz``, the state of an unfinished run, with checks of the run it belongs to."""

import json
from pathlib import Path

import jax
import numpy as np

from sam_optax.experiments.errors import UserError
from sam_optax.experiments.reporting import archive, output, results
from sam_optax.experiments.reporting.console import say
from sam_optax.experiments.training import identity
from sam_optax.experiments.types import Json, PyTree, Record

CHECKPOINT = "checkpoint.npz"


class Checkpoints:
    """The last checkpoint of a run, which has the ``epoch``; 0: there is none.

    It is written synchronously: writing in the background would disturb the timing.
    """

    def __init__(self, out: Path, every: int, run: Json) -> None:
        self.path, self.every, self.epoch = out / CHECKPOINT, every, 0
        self._about: Record = {"identity": run, "versions": results.versions()}
        self._found: tuple[Record, dict[str, np.ndarray]] = {}, {}

    def find(self, resume: bool) -> None:
        """Reads the checkpoint, if there is one, and notes versions of libraries that have changed.

        A :class:`UserError` says that it is damaged, of another run, or not to be resumed.
        """
        if not self.path.exists():
            return
        if not resume:
            raise UserError(
                f"--out: {self.path} is the checkpoint of an unfinished run; add --resume to "
                "continue that run, remove the file to start again, or choose another --out."
            )
        arrays = archive.read(self.path)
        with results.describing(self.path):
            found = json.loads(arrays.pop("record").tobytes())
            identity.check(found["identity"], self._about["identity"], f"{self.path} is of")
            self.epoch, self._found = found["epoch"], (found["methods"], arrays)
            was, now = found["versions"], self._about["versions"]
        if new := [f"{k} {was.get(k)} (now {v})" for k, v in now.items() if v != was.get(k)]:
            numbers = "the numbers may differ a little from those of an uninterrupted run."
            say(f"The checkpoint was written with {', '.join(new)}: {numbers}")

    def restore(self, like: PyTree) -> tuple[Record, PyTree]:
        """What was saved; the arrays must be as those of ``like``, and get their shardings."""
        (record, arrays), self._found = self._found, ({}, {})
        with results.describing(self.path):
            states = [arrays[f"states/{i}"] for i in range(len(arrays))]
            found = jax.tree.unflatten(jax.tree.structure(like), states)
            return record, jax.tree.map(_like, found, like)

    def save(self, epoch: int, record: Record, arrays: PyTree) -> None:
        """Writes a checkpoint, which takes the place of the one before when it is complete."""
        text = json.dumps({**self._about, "epoch": epoch, "methods": record}).encode()
        states = jax.device_get([_plain(leaf) for leaf in jax.tree.leaves(arrays)])
        content = {"record": np.frombuffer(text, np.uint8), "states": dict(enumerate(states))}
        npz = archive.to_npz(content, self._about["identity"])
        then = f"continue from epoch {self.epoch}" if self.epoch else "start again"
        output.write(self.path.parent, {CHECKPOINT: npz}, f"fix the cause; --resume will {then}")
        self.epoch = epoch


def _plain(leaf: jax.Array) -> jax.Array:
    """An array, or of a typed key its integer data."""
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def _like(found: np.ndarray, leaf: jax.Array) -> jax.Array:
    """What was written of an array, as that array is: with its sharding, and a typed key again."""
    plain = _plain(leaf)
    if (found.shape, found.dtype) != (plain.shape, plain.dtype):
        raise ValueError(f"{found.dtype}{found.shape} in the place of {plain.dtype}{plain.shape}")
    placed, is_key = jax.device_put(found, plain.sharding), plain.dtype != leaf.dtype
    return jax.random.wrap_key_data(placed, impl=jax.random.key_impl(leaf)) if is_key else placed
