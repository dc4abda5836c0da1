"""User data: a NumPy archive with four arrays."""

import os

import numpy as np

from sam_optax.experiments.data.arrays import check
from sam_optax.experiments.data.images import Examples, Raw
from sam_optax.experiments.errors import UserError

KEYS = ("x_train", "y_train", "x_test", "y_test")
_RECIPE = f"write it with numpy.savez(path, {', '.join(f'{key}=...' for key in KEYS)})"


def load(path: str) -> Raw:
    """Reads an archive with ``x_train``, ``y_train``, ``x_test`` and ``y_test``.

    Examples are vectors (n, features) or images (n, height, width[, channels]).
    """
    key, arrays = "", {}
    try:
        # Opened here because NumPy does not close files that it cannot read.
        with open(os.path.expanduser(path), "rb") as file, np.load(file) as archive:
            for key in KEYS:
                if archive.files.count(key) != 1:
                    raise ValueError(f"the file has {', '.join(archive.files) or 'no arrays'}")
                arrays[key] = archive[key]
                if not isinstance(arrays[key], np.ndarray):
                    raise ValueError("not an array")
    except Exception as error:  # NumPy and zipfile raise many types
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        what = f"{key} cannot be read" if key else "not a readable .npz file"
        raise UserError(f"{what} ({reason}); {_RECIPE}.") from error
    for key, x in arrays.items():
        if x.ndim > 4 or (x.ndim == 4 and x.shape[1] <= 4 < min(x.shape[2:])):
            order = "use (n, height, width, channels), of channels first numpy.moveaxis(x, 1, -1)"
            raise UserError(f"{key} has shape {x.shape}; {order}.")
    x_train, y_train, x_test, y_test = arrays.values()
    return Raw(Examples(x_train, y_train), Examples(x_test, y_test), check(arrays))
