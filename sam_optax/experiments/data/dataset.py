"""Data sets and how to load them."""

import dataclasses
import hashlib
from typing import Any

import numpy as np

from sam_optax.experiments.data import builtin, hugging_face, npz, text
from sam_optax.experiments.data.images import Examples, statistics
from sam_optax.experiments.errors import UserError

DATASETS = ("digits", "mnist5k", "npz:PATH", "hf:NAME_OR_PATH", "text", "text:PATH", "pairs:PATH")


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Training and test examples.

    Attributes:
      name: the name given on the command line.
      train: the training examples.
      test: the test examples.
      classes: number of classes; labels are 0, …, classes − 1. Those of text are tokens.
      mean: mean of each channel of uint8 images, in [0, 1]; ``None`` if x needs no scaling.
      std: standard deviation of each channel, likewise.
      sha256: digest of examples and labels before scaling, whose rounding differs between machines.
        For images on disk: digest of the labels and of mean and deviation of a sample.
      notes: further information on the data for the reader of the results.
    """

    name: str
    train: Examples
    test: Examples
    classes: int
    mean: np.ndarray | None
    std: np.ndarray | None
    sha256: str
    notes: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one example, as the network receives it."""
        x = self.train.x
        return x.shape[1:] if isinstance(x, np.ndarray) else (x.size, x.size, 3)

    @property
    def text(self) -> bool:
        """Whether the examples are tokens, each with a label."""
        return isinstance(self.train.x, np.ndarray) and self.train.x.dtype.kind == "i"

    @property
    def resident(self) -> bool:
        """Whether all examples are in memory."""
        return all(isinstance(part.x, np.ndarray) for part in (self.train, self.test))

    def some(self, scale: float) -> "Dataset":
        """A subset of the training and test examples, the same in every run."""
        if scale == 1:
            return self
        parts = []
        for i, part in enumerate((self.train, self.test)):
            order = np.random.default_rng([7, i]).permutation(len(part.y))
            parts.append(part.some(np.sort(order[: max(1, round(scale * len(order)))])))
        return dataclasses.replace(self, train=parts[0], test=parts[1])


def load(
    spec: str,
    *,
    image_column: str | None = None,
    label_column: str | None = None,
    test_split: str | None = None,
    image_size: int | None = None,
    length: int | None = None,
) -> Dataset:
    """Loads and prepares one of ``DATASETS``; see compare for the options."""
    kind, _, path = spec.partition(":")
    options = {"image-column": image_column, "label-column": label_column, "test-split": test_split}
    if kind == "hf" and path:
        raw = hugging_face.load(path, image_column, label_column, test_split, image_size or 224)
    elif given := [f"--{name} {value}" for name, value in options.items() if value is not None]:
        raise UserError(f"{given[0]}: needs --dataset hf:NAME_OR_PATH, not {spec}; leave it out.")
    elif kind == "text" or (kind == "pairs" and path):
        raw = text.load(kind, path, length)
    elif length is not None:
        raise UserError(f"--length {length}: is for --dataset text and pairs, not {spec}.")
    elif spec in ("digits", "mnist5k"):
        raw = getattr(builtin, spec)()
    elif kind == "npz" and path:
        raw = npz.load(path)
    else:
        raise UserError(f"--dataset {spec}: unknown data set; use one of {', '.join(DATASETS)}.")
    train, test, classes, notes = raw
    contents: list[Any] = [*train, *test]
    mean = std = None
    if kind == "hf" and not (isinstance(train.x, np.ndarray) and train.x.ndim == 2):
        mean, std = statistics(train.x)
        if not isinstance(train.x, np.ndarray):
            contents = [train.y, test.y, mean.round(3), std.round(3)]
    elif kind not in ("text", "pairs"):
        train, test = _scaled(*contents)
    digest = hashlib.sha256()
    for array in contents:
        digest.update(f"{array.dtype} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).data)
    return Dataset(spec, train, test, classes, mean, std, digest.hexdigest(), notes)


def _scaled(
    x_train: np.ndarray, y_train: np.ndarray, x_test: np.ndarray, y_test: np.ndarray
) -> list[Examples]:
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
    scaled = [((x - mean) / size).astype(np.float32) for x in (wide, x_test)]
    return [
        Examples(x[..., None] if x.ndim == 3 else x, y.astype(np.int32))
        for x, y in zip(scaled, (y_train, y_test), strict=True)
    ]
