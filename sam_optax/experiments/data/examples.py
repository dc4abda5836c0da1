"""Examples, the data set that they make, and label noise."""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sam_optax.experiments.data.images import statistics
from sam_optax.experiments.errors import UserError


class Examples(NamedTuple):
    """Labelled examples."""

    x: np.ndarray  # (n, …), float32 or tokens for the network, or uint8 images
    y: np.ndarray  # int32 classes, (n,); targets of a user's loss, int32 or float32, (n, …)


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Training and test examples."""

    name: str  # as on the command line
    train: Examples
    test: Examples
    classes: int  # of which labels are indices; of a regression, outputs
    mean: np.ndarray | None  # of each channel of uint8 images, in [0, 1]
    std: np.ndarray | None  # likewise; both are None if x needs no scaling
    # Digest of examples and labels before scaling, whose rounding differs between machines.
    sha256: str
    notes: tuple[str, ...] = ()  # for the reader of the results
    described: str = ""  # as it was understood, before scaling, on one line

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one example, as the network receives it."""
        return self.train.x.shape[1:]

    @property
    def dtype(self) -> type:
        """The type of examples, as the network receives them: int32 for tokens, else float32."""
        return np.int32 if self.train.x.dtype == np.int32 else np.float32


def hold_out(examples: Examples) -> tuple[Examples, Examples]:
    """Holds out a fifth of each class for testing, the same in every run.

    It is any fifth where labels are no classes, or a class has only one example.
    """
    from sklearn.model_selection import train_test_split

    x, y, how = *examples, {"test_size": 0.2, "random_state": 0}
    if len(y) < 2:
        raise UserError("it has one example and no test examples; add some.")
    try:
        train, test = train_test_split(np.arange(len(y)), stratify=y, **how)
    except ValueError:
        train, test = train_test_split(np.arange(len(y)), **how)
    return Examples(x[train], y[train]), Examples(x[test], y[test])


def check_array(name: str, x: np.ndarray) -> None:
    """Raises for numbers that cannot be trained on."""
    if x.ndim < 2 or x.size == 0:
        raise UserError(
            f"{name} has shape {x.shape}; use (n, features), or images (n, height, width[, "
            "channels]), with no dimension of size 0, and labels in the other array."
        )
    if x.dtype.kind not in "fiub":
        raise UserError(f"{name} has dtype {x.dtype}; use real numbers.")
    with np.errstate(over="ignore"):  # larger values are infinite in float32
        bad = np.count_nonzero(~np.isfinite(x.astype(np.float32)))
    if bad:
        raise UserError(
            f"{name} has {bad} values that are NaN or infinite in float32; remove them."
        )


def prepared(
    name: str,
    train: Examples,
    test: Examples | None,
    classes: int,
    *,
    dtype: type | None = None,
    notes: Sequence[str] = (),
    splits: Sequence[str] = ("train", "test"),
    labels: str = "classes",
) -> Dataset:
    """The data set of examples as they are read; without a ``test``, a fifth is held out.

    They are converted to ``dtype`` or, without one, scaled; uint8 is for images, which training
    normalizes. ``splits`` and ``labels`` are words of the description.
    """
    if test is None:
        note = "There are no test examples: a fifth of the training examples is held out."
        (train, test), notes = hold_out(train), [*notes, note]
    both = train.x, test.x
    mean, std = statistics(train.x) if dtype == np.uint8 else (None, None)
    x = [of.astype(dtype, copy=False) for of in both] if dtype else _scaled(*both)
    digest = hashlib.sha256()
    for array in (*train, *test):
        digest.update(f"{array.dtype} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).data)
    counts = f"{splits[0]} {len(train.y):,}, {splits[1]} {len(test.y):,}"
    shape = "×".join(map(str, x[0].shape[1:]))
    low, high = min(of.min() for of in both), max(of.max() for of in both)
    content = f"examples of {shape} {train.x.dtype} in [{low:g}, {high:g}]"
    described = f"{counts} {content}, {classes:,} {labels}"
    kind = np.int32 if train.y.dtype.kind in "iu" else np.float32
    train, test = map(Examples, x, [of.astype(kind) for of in (train.y, test.y)])
    sha256 = digest.hexdigest()
    return Dataset(name, train, test, classes, mean, std, sha256, tuple(notes), described)


def _scaled(x_train: np.ndarray, x_test: np.ndarray) -> list[np.ndarray]:
    """Scales inputs to the order of 1, by the statistics of the training examples.

    Features of vectors have different units, so each is normalized to mean 0 and variance 1. Pixels
    share one unit: they are divided by the largest magnitude, so that black stays 0.
    """
    wide = x_train.astype(np.float64)
    if wide.ndim == 2:
        mean, size = wide.mean(axis=0), wide.std(axis=0)
    else:
        mean, size = np.zeros(()), np.abs(wide).max()
    size = np.where(size > 0, size, 1)
    both = [((x - mean) / size).astype(np.float32) for x in (wide, x_test)]
    return [x[..., None] if x.ndim == 3 else x for x in both]


def corrupt(labels: np.ndarray, rate: float, classes: int, rng: np.random.Generator) -> np.ndarray:
    """A copy in which exactly ``round(rate · n)`` labels are changed to a random other class."""
    chosen = rng.choice(len(labels), round(rate * len(labels)), replace=False)
    noisy = labels.copy()
    noisy[chosen] = (labels[chosen] + rng.integers(1, classes, noisy[chosen].shape)) % classes
    return noisy
