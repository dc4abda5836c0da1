"""Arrays in ``.npz`` files: the networks of a run, and the state of one that is unfinished.

The comment of the archive is the digest of the run's identity, so that a file which another run
has left in the same directory is recognized.
"""

import hashlib
import io
import json
import zipfile
from pathlib import Path

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from sam_optax.experiments.errors import UserError
from sam_optax.experiments.types import Json, Record


def mark(identity: Json) -> str:
    """What the files of a run are marked with: the SHA-256 of its identity."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def to_npz(arrays: Json, identity: Json) -> bytes:
    """The file of nested arrays, such as networks by ``method/seed/collection/path``."""
    file = io.BytesIO()
    archive = zipfile.ZipFile(file, "w")  # no context, which would turn Ctrl-C into a ValueError
    archive.comment = mark(identity).encode()
    for path, leaf in flatten_dict(dict(arrays)).items():
        array, name = np.asarray(leaf), "/".join(map(str, path))
        if array.dtype.isbuiltin == 2:  # of JAX, such as bfloat16: bytes in a field of its name
            array = array.view([(array.dtype.name, f"V{array.dtype.itemsize}")])
        with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
            np.lib.format.write_array(member, array, allow_pickle=False)
    archive.close()
    return file.getvalue()


def read(path: Path, start: str = "", identity: Json | None = None) -> dict[str, np.ndarray]:
    """The arrays of a file by their names, of those that begin with ``start``.

    Raises:
      UserError: the file is damaged, or of another run than the one with the ``identity``.
    """
    arrays = {}
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()  # not names, which damage may make equal
            # Sizes beyond 4 GiB take 28 bytes; one with more has swallowed the entry after it.
            if not members or any(len(of.extra + of.comment) > 28 for of in members):
                raise ValueError("its table of contents has changed")
            for member in (of for of in members if of.filename.startswith(start)):
                # Read to its end, where its checksum is compared, before it is understood.
                array = np.lib.format.read_array(io.BytesIO(archive.read(member)))
                dtype, *_ = array.dtype.names or (array.dtype,)
                arrays[member.filename.removesuffix(".npy")] = array.view(dtype)
    except MemoryError:
        raise
    except Exception as error:  # damaged files raise many types
        raise UserError(f"{path}: is damaged ({error}); remove it, and train again.") from error
    if identity is not None and archive.comment != mark(identity).encode():
        raise UserError(f"{path}: is of another run than results.json; train again with --out.")
    return arrays


def load_params(path: Path, start: str = "", identity: Json | None = None) -> Record:
    """The variables in a file of networks, by method and seed; see :func:`read`."""
    methods = unflatten_dict(read(path, start, identity), sep="/").items()
    return {name: {int(seed): of for seed, of in seeds.items()} for name, seeds in methods}
