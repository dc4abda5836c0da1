# ruff: noqa: RUF001 (multiplication signs, in what is printed)
"""Data sets and how to load them."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from sam_optax.experiments.data import arrays, builtin, hugging_face, npz
from sam_optax.experiments.data.images import Examples, Raw, statistics
from sam_optax.experiments.errors import UserError

DATASETS = ("digits", "mnist5k", "npz:PATH", "hf:NAME_OR_PATH")


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Training and test examples.

    Attributes:
      name: the name given on the command line.
      train: the training examples.
      test: the test examples.
      classes: number of classes, of which labels are indices; of a regression, of outputs.
      mean: mean of each channel of uint8 images, in [0, 1]; ``None`` if x needs no scaling.
      std: standard deviation of each channel, likewise.
      sha256: digest of examples and labels before scaling, whose rounding differs between machines.
        For images on disk: digest of the labels and of mean and deviation of a sample.
      notes: further information on the data for the reader of the results.
      splits: the names of the two parts in the source.
      content: what an example and its label are, before scaling.
      classification: whether labels are classes, or else targets of a regression.
    """

    name: str
    train: Examples
    test: Examples
    classes: int
    mean: np.ndarray | None
    std: np.ndarray | None
    sha256: str
    notes: tuple[str, ...] = ()
    splits: tuple[str, str] = ("train", "test")
    content: str = "examples"
    classification: bool = True

    @property
    def described(self) -> str:
        """The data as they were understood, on one line."""
        (one, other), train, test = self.splits, self.train.y, self.test.y
        return f"{one} {len(train):,}, {other} {len(test):,} {self.content}"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one example, as the network receives it."""
        x = self.train.x
        return x.shape[1:] if isinstance(x, np.ndarray) else (x.size, x.size, 3)

    @property
    def dtype(self) -> type:
        """The type of examples, as the network receives them: int32 for tokens, else float32."""
        x = self.train.x
        return np.int32 if isinstance(x, np.ndarray) and x.dtype == np.int32 else np.float32

    @property
    def resident(self) -> bool:
        """Whether all examples are in memory."""
        return all(isinstance(part.x, np.ndarray) for part in (self.train, self.test))


def load(
    spec: str,
    *,
    image_column: str | None = None,
    label_column: str | None = None,
    test_split: str | None = None,
    image_size: int | None = None,
) -> Dataset:
    """Loads and prepares one of ``DATASETS``; see compare for the options."""
    kind, _, path = spec.partition(":")
    options = {"image-column": image_column, "label-column": label_column, "test-split": test_split}
    given = [f"--{name} {value}" for name, value in options.items() if value is not None]
    try:
        if kind == "hf" and path:
            raw = hugging_face.load(path, image_column, label_column, test_split, image_size or 224)
        elif given:
            where = f"needs --dataset hf:NAME_OR_PATH, not {spec}"
            raise UserError(f"{given[0]}: {where}; leave it out.")
        elif spec in ("digits", "mnist5k"):
            raw = getattr(builtin, spec)()
        elif kind == "npz" and path:
            raw = npz.load(path)
        else:
            raise UserError(f"unknown data set; use one of {', '.join(DATASETS)}.")
        return _prepared(spec, raw, scale=True)
    except (UserError, MemoryError) as error:
        reason, memory = str(error), error if isinstance(error, MemoryError) else error.__cause__
        if isinstance(memory, MemoryError):
            files = [file for file in (Path(path), *Path(path).rglob("*")) if file.is_file()]
            size = f"{sum(file.stat().st_size for file in files):,} bytes in files"
            reason = f"it does not fit into memory ({str(memory) or size}); use fewer examples."
        prefix = "" if reason.startswith("--") else f"--dataset {spec}: "
        raise UserError(prefix + reason) from error


def from_arrays(
    *,
    train: tuple[Any, Any],
    test: tuple[Any, Any] | None = None,
    name: str = "arrays",
    classification: bool = True,
) -> Dataset:
    """A data set of your arrays: training and test examples with their labels, each a pair (x, y).

    Examples have any shape (n, …) and are not scaled: floats and uint8 become float32, all other
    integers are tokens, int32. Labels are classes 0, …, C − 1, (n,), or without ``classification``
    targets, (n,) or (n, outputs): integers become int32, others float32. Without ``test``, a fifth
    of the training examples is held out.

    Raises:
      UserError: an array cannot be trained on; the message names it, its value and the remedy.
    """
    found: list[Any] = []
    for part, pair in {"train": train, "test": train if test is None else test}.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise UserError(f"{part} is of type {type(pair).__name__}; pass a pair (x, y).")
        found += map(np.asarray, pair)
    if test is None and len(found[0]) == len(found[1]) > 1:
        parts = builtin.hold_out(Examples(*found[:2]), by_class=False)
        found = [*parts.train, *parts.test]
    names = ("x of train", "y of train", "x of test", "y of test")
    outputs = arrays.check(names, found, classification)
    tokens = [_tokens(x) for x in found[::2]]
    if tokens[0] != tokens[1] or (tokens[0] and max(x.max() for x in found[::2]) >= 2**31):
        raise UserError(
            f"x of train is {found[0].dtype}, x of test {found[2].dtype}; pass both as integers "
            "below 2³¹ (tokens), or both as floats or uint8."
        )
    held_out = "There are no test examples: a fifth of the training examples is held out."
    notes = (held_out,) if test is None else ()
    raw = Raw(Examples(*found[:2]), Examples(*found[2:]), outputs, notes)
    return _prepared(name, raw, scale=False, classification=classification)


def _tokens(x: np.ndarray) -> bool:
    return x.dtype.kind in "iu" and x.dtype != np.uint8


def _prepared(name: str, raw: Raw, scale: bool, classification: bool = True) -> Dataset:
    """The data set with its examples scaled, or with the statistics to scale images."""
    parts: Any = [raw.train.x, raw.test.x]
    x, y, mean, std = parts, [raw.train.y, raw.test.y], None, None
    contents: list[Any] = [*raw.train, *raw.test]
    if raw.images:
        mean, std = statistics(x[0])
        if not isinstance(x[0], np.ndarray):
            contents = [*y, mean.round(3), std.round(3)]
    elif scale:
        x = arrays.scaled(*x)
    else:
        x = [part.astype(np.int32 if _tokens(part) else np.float32) for part in x]
    digest = hashlib.sha256()
    for array in contents:
        digest.update(f"{array.dtype} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).data)
    integers = classification or y[0].dtype.kind in "iu"
    y = [part.astype(np.int32 if integers else np.float32) for part in y]
    train, test = map(Examples, x, y)
    found = Dataset(name, train, test, raw.classes, mean, std, digest.hexdigest())
    content, labels = "images on disk, read as {} uint8", "classes" if classification else "outputs"
    labels = labels if raw.classes > 1 else labels.removesuffix("s")
    if found.resident:
        low, high = min(part.min() for part in parts), max(part.max() for part in parts)
        content = f"examples of {{}} {parts[0].dtype} in [{low:g}, {high:g}]"
    content = content.format("×".join(map(str, found.shape)))
    names = f" ({', '.join([*raw.names[:3], '…'][: len(raw.names)])})" if raw.names else ""
    return dataclasses.replace(
        found,
        notes=raw.notes,
        splits=raw.splits,
        content=f"{content}, {raw.classes:,} {labels}{names}",
        classification=classification,
    )
