"""Data sets by name."""

import hashlib
from pathlib import Path

import numpy as np

from sam_optax.experiments.data import TEST_SHARE
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.papers import cifar, tfds
from sam_optax.experiments.papers.images import ArrayImages, ImageDataset, statistics

DATASETS = ("cifar10:PATH", "cifar100:PATH", "tfds:PATH", "digits")


def load(spec: str, image_size: int) -> ImageDataset:
    """Loads a data set.

    Args:
      spec: ``cifar10:PATH`` or ``cifar100:PATH`` (a published archive), ``tfds:PATH`` (a folder
        that TFDS has prepared) or ``digits`` (scikit-learn's 8×8 images, to try things out).
      image_size: see :func:`sam_optax.experiments.papers.tfds.load`.

    Raises:
      UserError: an unknown name, or a file that is missing or malformed.
    """
    kind, _, path = spec.partition(":")
    if kind in ("cifar10", "cifar100") and path:
        classes = int(kind.removeprefix("cifar"))
        return _in_memory(spec, classes, *cifar.load(Path(path).expanduser(), classes))
    if kind == "tfds" and path:
        return tfds.load(Path(path).expanduser(), image_size)
    if spec == "digits":
        return _digits()
    known = ", ".join(DATASETS)
    hint = "; give the path of its archive" if f"{kind}:PATH" in DATASETS else ""
    raise UserError(f"--dataset {spec}: unknown data set{hint}; use one of {known}.")


def _digits() -> ImageDataset:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    grey = np.round(digits.images * (255 / 16)).astype(np.uint8)
    images = np.repeat(grey[..., None], 3, axis=-1)
    x_train, x_test, y_train, y_test = train_test_split(
        images, digits.target, test_size=TEST_SHARE, random_state=0, stratify=digits.target
    )
    return _in_memory("digits", 10, x_train, y_train, x_test, y_test)


def _in_memory(
    spec: str,
    classes: int,
    x_train: np.ndarray,
    y_train: np.ndarray,
    x_test: np.ndarray,
    y_test: np.ndarray,
) -> ImageDataset:
    digest = hashlib.sha256()
    for array in (x_train, y_train, x_test, y_test):
        digest.update(np.ascontiguousarray(array))
    mean, std = statistics(x_train)
    train, test = ArrayImages(x_train, y_train), ArrayImages(x_test, y_test)
    return ImageDataset(spec, train, test, classes, x_train.shape[1], mean, std, digest.hexdigest())
