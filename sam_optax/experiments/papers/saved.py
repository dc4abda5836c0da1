"""The checkpoint of an unfinished run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from sam_optax.experiments import checkpoint_file, identity
from sam_optax.experiments.checkpoint_file import UnusableError
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.papers.step import State

FORMAT = "sam_optax.train.checkpoint"
NAME = "checkpoint.msgpack"


def encode(state: State, run: Mapping[str, Any], record: Mapping[str, Any]) -> bytes:
    """A checkpoint.

    Args:
      state: after an epoch.
      run: the identity of the run.
      record: what has been measured, as plain data.
    """
    return checkpoint_file.encode(
        {"identity": run, "record": record}, jax.device_get(_arrays(state)), FORMAT
    )


def load(path: Path, run: Mapping[str, Any], like: State) -> tuple[State, dict[str, Any]] | None:
    """The state and the record of a checkpoint, or ``None`` if there is none.

    Args:
      path: the file.
      run: the identity of the run that is to be continued.
      like: a state with the structure, shapes, dtypes and devices to expect.

    Raises:
      UserError: it is damaged, or of another run.
    """
    try:
        found, arrays = checkpoint_file.decode(path.read_bytes(), FORMAT)
        identity.check_checkpoint(path, found["identity"], run)
        expected = _arrays(like)
        arrays = checkpoint_file.with_structure(arrays, expected)
    except FileNotFoundError:
        return None
    except (OSError, UnusableError) as error:
        raise UserError(
            f"--resume: {path} cannot be used: {error}. Remove it to start again, or choose "
            "another --out."
        ) from error
    placed = jax.tree.map(
        lambda leaf, there: jax.make_array_from_process_local_data(there.sharding, leaf),
        arrays,
        expected,
    )
    return like.replace(**placed), found["record"]


def _arrays(state: State) -> dict[str, Any]:
    return {name: getattr(state, name) for name in ("step", "params", "opt_state", "batch_stats")}
