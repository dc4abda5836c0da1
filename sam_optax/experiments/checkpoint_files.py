"""How a checkpoint lies on the disk: complete and verified, or not there at all.

It is a directory that Orbax writes under another name and renames when it is complete: ``run`` is
JSON that says what it is, and ``arrays`` holds the params and optimizer states. A digest of both
tells what the disk has spoilt.

Orbax is imported inside the functions, so that runs without checkpoints do not wait for it.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

_DIGEST = "sha256"


class UnreadableError(Exception):
    """A checkpoint that is damaged or cannot be read; the message says why."""


def write(target: Path, run: Mapping[str, Any], arrays: Any) -> None:
    """Writes a checkpoint, and returns when it is complete.

    In the background, it would disturb the times of the training steps.

    Args:
      target: a directory that does not exist yet, in one that does.
      run: plain data.
      arrays: a tree of NumPy arrays.
    """
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(
            target.absolute(),
            ocp.args.Composite(
                run=ocp.args.JsonSave({**run, _DIGEST: _digest(run, arrays)}),
                arrays=ocp.args.StandardSave(arrays),
            ),
        )


def read_run(directory: Path) -> dict[str, Any]:
    """Reads what :func:`write` was given as ``run``, and its digest.

    Raises:
      UnreadableError: it is not there or no JSON.
    """
    import orbax.checkpoint as ocp

    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            items = ocp.args.Composite(run=ocp.args.JsonRestore())
            run = checkpointer.restore(directory.absolute(), items).run
    except Exception as error:  # there is no telling what damaged files raise
        raise UnreadableError(reason(error)) from error
    if not isinstance(run, dict):
        raise UnreadableError("what it says of itself is missing")
    return run


def read_arrays(directory: Path, run: Mapping[str, Any], like: Any) -> Any:
    """Reads the arrays and verifies the whole checkpoint.

    Args:
      directory: of the checkpoint.
      run: what :func:`read_run` has returned.
      like: NumPy arrays with the structure, shapes and dtypes to expect.

    Raises:
      UnreadableError: something is not what it was when it was written.
    """
    import orbax.checkpoint as ocp

    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            items = ocp.args.Composite(arrays=ocp.args.StandardRestore(like))
            arrays = checkpointer.restore(directory.absolute(), items).arrays
    except Exception as error:  # there is no telling what damaged files raise
        raise UnreadableError(reason(error)) from error
    rest = {key: value for key, value in run.items() if key != _DIGEST}
    if run.get(_DIGEST) != _digest(rest, arrays):
        raise UnreadableError("its digest does not match its contents")
    if jax.tree.map(np.shape, arrays) != jax.tree.map(np.shape, like):
        raise UnreadableError("its arrays have other shapes than this version's")
    return arrays


def _digest(run: Mapping[str, Any], arrays: Any) -> str:
    digest = hashlib.sha256(json.dumps(run, sort_keys=True).encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(arrays):
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape} ".encode())
        digest.update(np.ascontiguousarray(leaf))
    return digest.hexdigest()


def reason(error: Exception) -> str:
    """Why something failed, in a few words."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return text.splitlines()[0][:200].rstrip(".").lower()
