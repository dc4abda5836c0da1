"""Data sets and how to load them."""

import dataclasses
import hashlib
from typing import Any

import numpy as np

from sam_optax.experiments.data import arrays, builtin, hugging_face, npz
from sam_optax.experiments.data.images import Examples, ImageColumn, Raw, statistics
from sam_optax.experiments.errors import UserError

DATASETS = ("digits", "mnist5k", "npz:PATH", "hf:NAME_OR_PATH")
ARRAYS = "arrays"
"""The name of data that are given as arrays."""


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
      classification: whether labels are classes, or else targets of a regression.
      described: the data as they were understood before scaling, on one line.
    """

    name: str
    train: Examples
    test: Examples
    classes: int
    mean: np.ndarray | None
    std: np.ndarray | None
    sha256: str
    notes: tuple[str, ...] = ()
    classification: bool = True
    described: str = ""

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


def load(spec: str, *, image_size: int | None = None, **of_hugging_face: str | None) -> Dataset:
    """Loads and prepares one of ``DATASETS``; see compare for the options."""
    kind, _, path = spec.partition(":")
    given = {name: value for name, value in of_hugging_face.items() if value is not None}
    try:
        if kind == "hf" and path:
            raw = hugging_face.load(path, image_size or 224, **given)
        elif given:
            name, value = next(iter(given.items()))
            where = f"needs --dataset hf:NAME_OR_PATH, not {spec}"
            raise UserError(f"--{name.replace('_', '-')} {value}: {where}; leave it out.")
        elif spec in ("digits", "mnist5k"):
            raw = getattr(builtin, spec)()
        elif kind == "npz" and path:
            raw = npz.load(path)
        else:
            raise UserError(f"unknown data set; use one of {', '.join(DATASETS)}.")
        return _prepared(spec, raw, scale=True)
    except (UserError, MemoryError) as error:
        reason, cause = str(error), error.__cause__ or error
        if isinstance(cause, MemoryError):
            reason = f"it does not fit into memory ({cause}); use fewer examples."
        prefix = "" if reason.startswith("--") else f"--dataset {spec}: "
        raise UserError(prefix + reason) from error


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
    tokens = _tokens(x_train)
    if tokens != _tokens(x_test) or (tokens and max(x_train.max(), x_test.max()) >= 2**31):
        raise UserError(
            f"x of train is {x_train.dtype}, x of test {x_test.dtype}; pass both as integers "
            "below 2³¹ (tokens), or both as floats or uint8."
        )
    tested = None if test is None else Examples(x_test, y_test)
    raw = Raw(Examples(x_train, y_train), tested, outputs, classification=classification)
    return _prepared(ARRAYS, raw, scale=False)


def _tokens(x: np.ndarray) -> bool:
    return x.dtype.kind in "iu" and x.dtype != np.uint8


def _prepared(name: str, raw: Raw, scale: bool) -> Dataset:
    """The data set with its examples scaled, or with the statistics to scale images."""
    if raw.test is None:
        note = "There are no test examples: a fifth of the training examples is held out."
        train, test = builtin.hold_out(raw.train)
        raw = raw._replace(train=train, test=test, notes=(*raw.notes, note))
    parts: Any = raw.train, raw.test
    x: Any = [part.x for part in parts]
    mean = std = None
    contents: list[Any] = [*parts[0], *parts[1]]
    if raw.images:
        mean, std = statistics(x[0])
        if isinstance(x[0], ImageColumn):
            contents = [*contents[1::2], mean.round(3), std.round(3)]
    elif scale:
        x = arrays.scaled(*x)
    else:
        x = [of.astype(np.int32 if _tokens(of) else np.float32) for of in x]
    digest = hashlib.sha256()
    for array in contents:
        digest.update(f"{array.dtype} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).data)
    kind = np.int32 if raw.train.y.dtype.kind in "iu" else np.float32
    train, test = (Examples(of, part.y.astype(kind)) for of, part in zip(x, parts, strict=True))
    sha256, notes = digest.hexdigest(), raw.notes
    found = Dataset(name, train, test, raw.classes, mean, std, sha256, notes, raw.classification)
    return dataclasses.replace(found, described=_described(found, raw, parts))


def _described(dataset: Dataset, raw: Raw, parts: tuple[Examples, Examples]) -> str:
    sizes = zip(raw.splits, parts, strict=True)
    counts = ", ".join(f"{split} {len(part.y):,}" for split, part in sizes)
    shape, content = "×".join(map(str, dataset.shape)), "images on disk, read as {} uint8"
    if dataset.resident:
        x: Any = [part.x for part in parts]
        low, high = min(of.min() for of in x), max(of.max() for of in x)
        content = f"examples of {{}} {x[0].dtype} in [{low:g}, {high:g}]"
    labels = "classes" if dataset.classification else "output" + "s" * (raw.classes > 1)
    names = f" ({', '.join([*raw.names[:3], '…'][: len(raw.names)])})" if raw.names else ""
    return f"{counts} {content.format(shape)}, {raw.classes:,} {labels}{names}"
