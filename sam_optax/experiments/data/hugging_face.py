"""Data sets of the Hugging Face library, by name from the hub or cache, or from a folder."""

import importlib.util
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sam_optax.experiments.data import folders
from sam_optax.experiments.data.arrays import check_examples
from sam_optax.experiments.data.images import Examples, ImageColumn, Raw, in_memory
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.options.declare import suggest

_NUMBERS = ("int", "uint", "float", "bool")


def load(
    name: str,
    size: int,
    image_column: str | None = None,
    label_column: str | None = None,
    test_split: str | None = None,
) -> Raw:
    """Loads a data set by name, or from a folder: saved to disk, parquet files, or images.

    Columns are found by their feature types (``Image``, ``ClassLabel``), or else by common names;
    without images, all numeric ones. Images of equal size that fit into memory are loaded
    unchanged; others stay on disk and are resized to squares of ``size`` pixels. Without a labelled
    split ``test`` or ``validation``, a fifth of the training examples is held out.
    """
    splits, notes = _open(name)
    train = _train(splits, test_split)
    features = splits[train].features
    label, image, columns = _columns(features, image_column, label_column)
    test = test_split or _labelled(splits, train, label)
    used = {split: splits[split] for split in (train, test) if split}
    for split, rows in used.items():
        if missing := [column for column in (label, *columns) if column not in rows.features]:
            raise UserError(f"the split {split} lacks the column {missing[0]}.")
        if not len(rows):
            raise UserError(f"the split {split} is empty.")
    y, names = _labels(used, label)
    others = [column for column in features if column not in (label, *columns)]
    absent = [names[i] for i in np.setdiff1d(np.arange(len(names)), y[0])]
    unused = [f"{split} ({len(splits[split]):,})" for split in splits if split not in used]
    left_out = {
        "Columns that are left out": [] if image else others,
        "Splits that are left out": unused,
        "Classes without training examples": absent,
    }
    notes += [f"{what}: {', '.join(found)}." for what, found in left_out.items() if found]
    if image:
        sources = [
            ImageColumn(rows, image, size, f"--dataset hf:{name}: {split}", _roots(name))
            for split, rows in used.items()
        ]
        x: Sequence[Any] = in_memory(sources) or sources
    else:
        x = [_vectors(split, rows, columns) for split, rows in used.items()]
    parts: list[Any] = [*map(Examples, x, y), None]
    origin = (train, test or "held out")
    return Raw(parts[0], parts[1], len(names), tuple(notes), origin, names, image is not None)


def _open(name: str) -> tuple[Mapping[str, Any], list[str]]:
    """The splits of a data set, and notes."""
    for module in ("datasets", "grain", "PIL"):
        if importlib.util.find_spec(module) is None:
            raise UserError(f'{module} is not installed; run pip install "sam_optax[hf]".')
    import datasets
    import huggingface_hub

    datasets.disable_progress_bars()
    huggingface_hub.utils.disable_progress_bars()
    for logger in ("datasets", "huggingface_hub"):
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    notes: list[str] = []
    try:
        path = Path(os.path.expanduser(name)).resolve()
        if any((path / file).is_file() for file in ("dataset_dict.json", "state.json")):
            # The library cannot open paths that are not UTF-8.
            with tempfile.TemporaryDirectory() as folder:
                link = Path(folder, "data")
                link.symlink_to(path)
                found = datasets.load_from_disk(link)
        elif path.is_dir():
            found, notes = folders.opened(path)
        elif path.exists() or name.startswith(("/", "~", ".")):
            raise ValueError("a file, not a folder" if path.exists() else "there is no such folder")
        else:
            found = datasets.load_dataset(name)
    except UserError:
        raise
    except Exception as error:  # from the library, the hub, or Arrow
        reason = " ".join(str(error.__cause__ or error).split())
        raise UserError(
            f"cannot be loaded ({reason}); give a name from huggingface.co/datasets, or a folder "
            "of parquet files, of images (train/cat/1.png), or saved to disk."
        ) from error
    return {"train": found} if isinstance(found, datasets.Dataset) else found, notes


def _roots(name: str) -> list[Path]:
    """The folders in which the files of a data set are."""
    import datasets
    import huggingface_hub

    caches = (datasets.config.HF_DATASETS_CACHE, huggingface_hub.constants.HF_HUB_CACHE)
    return [Path(os.path.expanduser(name)).resolve(), *map(Path, caches)]


def _columns(
    features: Mapping[str, Any], image_column: str | None, label_column: str | None
) -> tuple[str, str | None, list[str]]:
    """The columns of labels, of images if there is one, and of examples."""
    label = _pick("label", "ClassLabel", "label labels fine_label", features, label_column)
    if label is None:
        raise UserError(
            f"it has no labels; give --label-column, one of {', '.join(features)}, or put images "
            "into one folder for each class, all at one depth."
        )
    rest = {name: feature for name, feature in features.items() if name != label}
    if image := _pick("image", "Image", "image img", rest, image_column):
        return label, image, [image]
    types = {name: str(getattr(feature, "dtype", feature)) for name, feature in rest.items()}
    plain = [name for name, feature in rest.items() if type(feature).__name__ == "Value"]
    numbers = [name for name in plain if types[name].startswith(_NUMBERS)]
    if not numbers:
        found = ", ".join(f"{name} ({kind})" for name, kind in types.items())
        raise UserError(f"it has neither images nor numbers, only {found or 'labels'}.")
    return label, None, numbers


def _pick(
    what: str, kind: str, usual: str, features: Mapping[str, Any], given: str | None
) -> str | None:
    """The requested column, or the only one of its type, or one with a common name."""
    if given is not None and given not in features:
        raise UserError(f"--{what}-column {given}: no such column; {suggest(given, features)}")
    found = [name for name, feature in features.items() if type(feature).__name__ == kind]
    named = [name for name in usual.split() if name in (found or features)]
    if given is None and len(found) > 1 and not named:
        raise UserError(f"it has several {what}s; give --{what}-column, one of {', '.join(found)}.")
    return given or next(iter([*named, *found]), None)


def _train(splits: Mapping[str, Any], test_split: str | None) -> str:
    """The name of the split for training."""
    if test_split is not None and test_split not in splits:
        raise UserError(f"--test-split {test_split}: no such split; {suggest(test_split, splits)}")
    others = [split for split in splits if split != test_split]
    if "train" not in others and len(others) != 1:
        raise UserError(f"it has no split named train, only {', '.join(splits)}.")
    return "train" if "train" in others else others[0]


def _labelled(splits: Mapping[str, Any], train: str, label: str) -> str | None:
    """The name of a test split with labels; some test labels (ImageNet's) are not public."""
    others = {k: of for k, of in splits.items() if k != train and label in of.features}
    for split in ("test", "validation"):
        if split in others and {*_column(others[split], label).unique().to_pylist()} - {None, -1}:
            return split
    return None


def _column(rows: Any, name: str) -> Any:
    return rows.select_columns([name]).with_format("arrow")[:][name]


def _labels(used: Mapping[str, Any], column: str) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """The labels of each split, int32, and the names of the classes."""
    names = [getattr(rows.features[column], "names", None) for rows in used.values()]
    if names[0] != names[-1]:
        raise UserError(f"the column {column} has other classes in {[*used][-1]}: {names[-1]}.")
    known = None if names[0] is None else np.arange(len(names[0]))
    found = []
    for split, rows in used.items():
        where, values = f"the column {column} of {split}", _column(rows, column)
        y = values.to_numpy()
        if values.null_count or (y.dtype.kind not in "iub" and not isinstance(y[0], str)):
            raise UserError(
                f"{where} has {values.null_count} missing values and the type {values.type}; use "
                "integers or strings, one in every row."
            )
        known = np.unique(y) if known is None else known
        if not (fits := np.isin(y, known)).all():
            raise UserError(f"{where} has the label {y[~fits][0]}, which is not a class.")
        found.append(np.searchsorted(known, y).astype(np.int32))
    if known is None or len(known) < 2:
        raise UserError(f"the column {column} has only one class; use at least two.")
    return found, tuple(names[0] or map(str, known))


def _vectors(split: str, rows: Any, columns: Sequence[str]) -> np.ndarray:
    vectors = rows.select_columns(columns).to_pandas().to_numpy(float)
    for i, column in enumerate(columns):
        check_examples(f"the column {column} of {split}", vectors[:, i : i + 1])
    return np.ascontiguousarray(vectors)
