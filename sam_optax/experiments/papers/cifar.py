"""CIFAR-10 and CIFAR-100 from their published archives.

Both formats are read, from the ``.tar.gz`` file or from the folder unpacked from it:

* binary: records of one label (CIFAR-100: coarse and fine label) and 3072 bytes,
* Python: pickles of Python 2 with ``data`` and ``labels`` (CIFAR-100: ``fine_labels``),

the pixels being the 1024 red, green and blue ones, row by row.
"""

import io
import pickle
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sam_optax.experiments.errors import UserError

PIXELS = 3 * 32 * 32


class Layout(NamedTuple):
    """How a data set lies in its archive.

    Attributes:
      train: names of the files for training, without ``.bin``.
      test: name of the file for testing.
      label_bytes: labels in front of a binary record; the last one counts.
      labels: name of the labels in a pickle.
    """

    train: tuple[str, ...]
    test: str
    label_bytes: int
    labels: bytes


LAYOUTS = {
    10: Layout(tuple(f"data_batch_{i}" for i in range(1, 6)), "test_batch", 1, b"labels"),
    100: Layout(("train",), "test", 2, b"fine_labels"),
}


def load(path: Path, classes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Reads an archive.

    Args:
      path: the archive or the folder.
      classes: 10 or 100.

    Returns:
      Training images (uint8, (examples, 32, 32, 3)) and labels (int32), test images and labels.

    Raises:
      UserError: there is no such archive, or it is malformed.
    """
    spec, layout = f"--dataset cifar{classes}:{path}", LAYOUTS[classes]
    names = (*layout.train, layout.test)
    files = _files(path, spec, {n for name in names for n in (name, f"{name}.bin")})
    suffix = ".bin" if any(name.endswith(".bin") for name in files) else ""
    missing = [name + suffix for name in names if name + suffix not in files]
    if missing:
        raise UserError(
            f"{spec}: {', '.join(missing)} missing; give the published archive of CIFAR-{classes}, "
            "binary or Python version, or the folder unpacked from it."
        )
    parts = {}
    for name in names:
        parse = _parse_binary if suffix else _parse_pickle
        try:
            images, labels = parse(files[name + suffix], layout)
        except (ValueError, KeyError, TypeError, pickle.UnpicklingError, EOFError) as error:
            raise UserError(f"{spec}: {name + suffix} is malformed ({error}).") from error
        if not len(labels) or labels.max() >= classes or labels.min() < 0:
            raise UserError(
                f"{spec}: {name + suffix} has no examples, or labels outside 0 … {classes - 1}."
            )
        parts[name] = images.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels.astype(np.int32)
    x_train, y_train = (np.concatenate([parts[name][i] for name in layout.train]) for i in range(2))
    x_test, y_test = parts[layout.test]
    return x_train, y_train, np.ascontiguousarray(x_test), y_test


def _files(path: Path, spec: str, names: set[str]) -> dict[str, bytes]:
    """Contents by name, of the files with these names, however deep they lie."""
    try:
        if path.is_dir():
            found = [p for p in sorted(path.rglob("*")) if p.name in names and p.is_file()]
            return {p.name: p.read_bytes() for p in found}
        with tarfile.open(path) as archive:
            contents = {}
            for member in archive:
                name = member.name.rpartition("/")[2]
                if name in names and member.isfile() and (file := archive.extractfile(member)):
                    contents[name] = file.read()
            return contents
    except FileNotFoundError as error:
        raise UserError(
            f"{spec}: there is no such file; download the archive from "
            "https://www.cs.toronto.edu/~kriz/cifar.html first."
        ) from error
    except (OSError, EOFError, tarfile.TarError) as error:
        raise UserError(f"{spec}: cannot be read ({error}).") from error


def _parse_binary(content: bytes, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    size = layout.label_bytes + PIXELS
    if len(content) % size:
        raise ValueError(f"{len(content)} bytes, not a multiple of the {size} of a record")
    records = np.frombuffer(content, np.uint8).reshape(-1, size)
    return records[:, layout.label_bytes :], records[:, layout.label_bytes - 1]


def _parse_pickle(content: bytes, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    found = _Unpickler(io.BytesIO(content), encoding="bytes").load()
    if not isinstance(found, Mapping):
        raise TypeError("not a dictionary")
    images, labels = found[b"data"], np.asarray(found[layout.labels])
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise ValueError(f"{layout.labels.decode()} must be a list of integers")
    if getattr(images, "dtype", None) != np.uint8 or images.shape != (len(labels), PIXELS):
        raise ValueError(f"data must be uint8 of shape {(len(labels), PIXELS)}")
    return images, labels


_RECONSTRUCT = np.zeros(1).__reduce__()[0]


class _Unpickler(pickle.Unpickler):
    """Makes arrays of numbers and nothing else: a pickle can otherwise run any code."""

    def find_class(self, module: str, name: str) -> Any:
        package = module.partition(".")[0]
        if package == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        if package == "numpy" and name == "_reconstruct":
            return _RECONSTRUCT
        if (module, name) == ("_codecs", "encode"):  # bytes, as Python 3 writes them
            return lambda text, encoding: text.encode(encoding)
        raise pickle.UnpicklingError(f"it contains {module}.{name}, which is no array")
