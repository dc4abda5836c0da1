"""Networks in a file, ``params.npz``.

The comment of the archive is the digest of the run's identity, so that a file which another run
has left in the same directory is recognized.
"""

import hashlib
import io
import json
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.traverse_util
import numpy as np

from sam_optax.experiments.errors import UserError
from sam_optax.experiments.types import Json, PyTree, Record


def mark(identity: Json) -> str:
    """What the files of a run are marked with: the SHA-256 of its identity."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def to_npz(params: Mapping[str, Mapping[int, PyTree]], identity: Json) -> bytes:
    """The file of the variables of each method and seed: arrays ``method/seed/collection/path``."""
    flat = flax.traverse_util.flatten_dict(dict(params)).items()
    arrays: Record = {"/".join(map(str, path)): np.asarray(leaf) for path, leaf in flat}
    file = io.BytesIO()
    np.savez(file, **arrays)
    with zipfile.ZipFile(file, "a") as archive:
        archive.comment = mark(identity).encode()
    return file.getvalue()


def read(path: str | Path, start: str = "") -> tuple[str, dict[Any, np.ndarray]]:
    """The mark of a file, and its arrays by ``(method, seed, collection, ...)``.

    Only those whose names in the file begin with ``start``.

    Raises:
      UserError: the file is damaged.
    """
    arrays: dict[Any, np.ndarray] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for member in (of for of in archive.namelist() if of.startswith(start)):
                method, seed, *place = member.removesuffix(".npy").split("/")
                with archive.open(member) as file:
                    arrays[method, int(seed), *place] = np.lib.format.read_array(file)
            return archive.comment.decode(errors="replace"), arrays
    except (OSError, EOFError, RuntimeError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path}: is damaged ({error}); train again with --out.") from error


def load_params(path: str | Path, start: str = "") -> dict[str, dict[int, PyTree]]:
    """The variables of each method and seed in the output of :func:`to_npz`."""
    return flax.traverse_util.unflatten_dict(read(path, start)[1])
