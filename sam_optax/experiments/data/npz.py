"""User data: a NumPy archive with four arrays, checked before anything else runs."""

import os
from typing import BinaryIO

import numpy as np

from sam_optax.experiments.data.images import Examples, Raw
from sam_optax.experiments.errors import UserError

KEYS = ("x_train", "y_train", "x_test", "y_test")
_RECIPE = f"write it with numpy.savez(path, {', '.join(f'{key}=...' for key in KEYS)})"


def load(path: str) -> Raw:
    """Reads an archive with ``x_train``, ``y_train``, ``x_test`` and ``y_test``.

    Examples are vectors (n, features) or images (n, height, width[, channels]) of finite real
    numbers, labels are integers 0, …, classes − 1, each present in the training set. A mistake
    raises a :class:`UserError` that names the file and the remedy.
    """
    try:
        arrays = _read(os.path.expanduser(path))
        x_train, y_train, x_test, y_test = arrays
        for i, split in enumerate(("train", "test")):
            check_examples(f"x_{split}", arrays[2 * i])
            _check_labels(f"y_{split}", arrays[2 * i + 1], len(arrays[2 * i]))
        _check_together(x_train, y_train, x_test, y_test)
    except UserError as error:
        raise UserError(f"--dataset npz:{path}: {error}") from error
    return Raw(Examples(x_train, y_train), Examples(x_test, y_test), int(y_train.max()) + 1)


def _read(path: str) -> list[np.ndarray]:
    """The arrays of ``KEYS``."""
    if not os.path.isfile(path):
        what = "is a directory" if os.path.isdir(path) else "there is no such file"
        raise UserError(f"{what}; give the path of an .npz file.")
    try:
        # Opened here because NumPy does not close files that it cannot read.
        with open(path, "rb") as file:
            return _arrays(file)
    except OSError as error:
        raise UserError(f"cannot be read ({(error.strerror or str(error)).lower()}).") from error


def _arrays(file: BinaryIO) -> list[np.ndarray]:
    try:
        archive = np.load(file, allow_pickle=False)
    except Exception as error:  # NumPy and zipfile raise many types
        raise UserError(f"not a readable .npz file; {_RECIPE}.") from error
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise UserError(f"a single array, not an .npz archive; {_RECIPE}.")
    with archive:
        if missing := [key for key in KEYS if key not in archive.files]:
            found = ", ".join(archive.files) or "nothing"
            raise UserError(f"lacks {', '.join(missing)} (it has {found}); {_RECIPE}.")
        arrays = []
        for key in KEYS:
            try:
                arrays.append(archive[key])
            except Exception as error:  # zlib.error, for example
                raise UserError(f"{key} cannot be read ({error}); {_RECIPE}.") from error
    return arrays


def check_examples(name: str, x: np.ndarray) -> None:
    """Raises for examples that cannot be trained on."""
    if not 2 <= x.ndim <= 4 or x.size == 0:
        raise UserError(
            f"{name} has shape {x.shape}; use (n, features), (n, height, width) or "
            "(n, height, width, channels), with no dimension of size 0."
        )
    if x.dtype.kind not in "fiub":
        raise UserError(f"{name} has dtype {x.dtype}; use real numbers.")
    with np.errstate(over="ignore"):  # larger values are infinite in float32
        bad = np.count_nonzero(~np.isfinite(x.astype(np.float32)))
    if bad:
        raise UserError(
            f"{name} has {bad} values that are NaN or not finite in float32; remove them."
        )


def _check_labels(name: str, y: np.ndarray, examples: int) -> None:
    if y.dtype.kind not in "iu":
        raise UserError(f"{name} has dtype {y.dtype}; use integer class labels 0, 1, ….")
    if y.shape != (examples,):
        raise UserError(f"{name} has shape {y.shape}; use one label per example, ({examples},).")
    if y.min() < 0:
        raise UserError(f"{name} contains the label {y.min()}; use class labels 0, 1, ….")


def _check_together(
    x_train: np.ndarray, y_train: np.ndarray, x_test: np.ndarray, y_test: np.ndarray
) -> None:
    if x_train.shape[1:] != x_test.shape[1:]:
        shapes = f"x_test has examples of shape {x_test.shape[1:]}, x_train of {x_train.shape[1:]}"
        raise UserError(f"{shapes}; make them equal.")
    present = np.unique(y_train)
    gaps = np.flatnonzero(present != np.arange(len(present)))
    if len(gaps):
        raise UserError(
            f"y_train contains the label {present[gaps[0]]} but not {gaps[0]}; number the classes "
            "0, 1, … without gaps."
        )
    if len(present) < 2:
        raise UserError("y_train contains only one class; use at least two.")
    if y_test.max() >= len(present):
        raise UserError(
            f"y_test contains the label {y_test.max()}, but the training set has the classes 0 to "
            f"{len(present) - 1}; remove those examples or add the class to both."
        )
