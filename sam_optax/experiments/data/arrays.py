"""Arrays of examples and labels: checks before anything else runs, scaling, and label noise."""

from collections.abc import Mapping

import numpy as np

from sam_optax.experiments.errors import UserError


def check(arrays: Mapping[str, np.ndarray], classification: bool = True) -> int:
    """The number of classes, or of outputs of a regression.

    The arrays, by name, are training examples, their labels, test examples and theirs. Examples
    are finite real numbers; labels are 0, …, classes − 1, each present in the training set. A
    mistake raises a :class:`UserError` that names the array, its value and the remedy.
    """
    names, (x_train, y_train, x_test, y_test) = [*arrays], arrays.values()
    for name, labels in zip(names[::2], names[1::2], strict=True):
        check_examples(name, arrays[name])
        _check_labels(labels, arrays[labels], len(arrays[name]), classification)
    if x_train.shape[1:] != x_test.shape[1:] or y_train.shape[1:] != y_test.shape[1:]:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise UserError(f"the shapes are {shapes}; make those of test examples equal.")
    _check_scales({names[0]: x_train, names[2]: x_test})
    if not classification:
        return y_train.size // len(y_train)
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
    return len(present)


def check_examples(name: str, x: np.ndarray) -> None:
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
            f"{name} has {bad} values that are NaN or not finite in float32; remove them."
        )


def _check_labels(name: str, y: np.ndarray, examples: int, classification: bool) -> None:
    if y.shape[:1] != (examples,) or y.ndim > 2 - classification:
        raise UserError(
            f"{name} has shape {y.shape}; use one label per example, ({examples},), of one-hot "
            "labels their argmax."
        )
    if not classification:
        check_examples(name, y.reshape(examples, -1))
    elif y.dtype.kind not in "iu":
        raise UserError(f"{name} has dtype {y.dtype}; use integer class labels 0, 1, ….")


def _check_scales(parts: Mapping[str, np.ndarray]) -> None:
    """Raises if one part has been scaled to [0, 1] or [−1, 1] and the other has not."""
    sizes = {name: max(-float(x.min()), float(x.max())) for name, x in parts.items()}
    small, large = sorted(parts, key=sizes.__getitem__)
    if parts[small].dtype.kind == "f" and 0 < sizes[small] <= 1 and sizes[large] > 100:
        found = [f"{name} lies in [{x.min():g}, {x.max():g}]" for name, x in parts.items()]
        raise UserError(f"{' but '.join(found)}; scale both alike.")


def scaled(x_train: np.ndarray, x_test: np.ndarray) -> list[np.ndarray]:
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
