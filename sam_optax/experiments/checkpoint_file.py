"""A checkpoint as the contents of one file, which is replaced by the next one in one step.

Three parts, ended by line breaks but for the last: JSON that names the format and the digest of
the rest, JSON that says what was measured in which run, and the arrays in Flax's msgpack.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import flax.serialization
import jax
import numpy as np

FORMAT = "sam_optax.compare.checkpoint"
FORMAT_VERSION = 1


class UnusableError(Exception):
    """A checkpoint that cannot be used; the message says why."""


def encode(run: Mapping[str, Any], arrays: Any, format: str = FORMAT) -> bytes:
    """The contents of the file.

    Args:
      run: plain data.
      arrays: a tree of NumPy arrays.
      format: what kind of a file it is.
    """
    payload = flax.serialization.msgpack_serialize(flax.serialization.to_state_dict(arrays))
    rest = json.dumps(run).encode() + b"\n" + payload
    head = {"format": format, "version": FORMAT_VERSION, "sha256": _sha256(rest)}
    return json.dumps(head).encode() + b"\n" + rest


def decode(content: bytes, format: str = FORMAT) -> tuple[dict[str, Any], Any]:
    """What :func:`encode` was given, the arrays without the structure of their tree.

    Raises:
      UnusableError: it is damaged, or of another version of the format.
    """
    head, _, rest = content.partition(b"\n")
    try:
        kind = json.loads(head)
        name, version, digest = kind["format"], kind["version"], kind["sha256"]
    except (ValueError, TypeError, KeyError) as error:
        raise UnusableError("it is damaged, or of another kind") from error
    if name != format:
        raise UnusableError(f"it is a file of the kind {name}")
    if version != FORMAT_VERSION:
        raise UnusableError(
            f"it has version {version} of the format, which another version of sam_optax has "
            f"written and can continue; this one reads version {FORMAT_VERSION}"
        )
    if digest != _sha256(rest):
        raise UnusableError("it is damaged: its digest does not match its contents")
    run, _, payload = rest.partition(b"\n")
    return json.loads(run), flax.serialization.msgpack_restore(payload)


def with_structure(arrays: Any, like: Any) -> Any:
    """Decoded arrays in the structure of ``like``, whose shapes and dtypes they must have.

    Raises:
      UnusableError: they are another method's, or another version's.
    """
    try:
        tree = flax.serialization.from_state_dict(like, arrays)
        matching = jax.tree.map(lambda a, b: a.shape == b.shape and a.dtype == b.dtype, tree, like)
    except (ValueError, AttributeError) as error:
        raise UnusableError("its arrays are arranged otherwise") from error
    if not jax.tree.all(matching):
        raise UnusableError("its arrays have other shapes or dtypes")
    return jax.tree.map(np.asarray, tree)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
