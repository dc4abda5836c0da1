"""Data sets of the Hugging Face library, by name from the hub or cache, or from a folder."""

import csv
import glob
import importlib.util
import logging
import os
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sam_optax.experiments.data.examples import Dataset, Examples, check_array, prepared
from sam_optax.experiments.data.images import FORMATS, Encoded, in_memory
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.options.declare import suggest


def load(name: str, given: Mapping[str, Any]) -> Dataset:
    """Loads a data set by name, or from a folder: saved to disk, parquet files, or images.

    Columns that are not ``given`` by the options of the command are the only ones of their feature
    types (``Image``, ``ClassLabel``); without images, examples are all numeric columns. Without a
    labelled split ``test`` or ``validation``, a fifth of the training examples is held out.
    """
    splits, notes = _open(name)
    train = _train(splits, given.get("test_split"))
    features = splits[train].features
    label, columns, images = _columns(features, given)
    test = given.get("test_split") or _labelled(splits, train, label)
    used = {split: splits[split] for split in (train, test) if split}
    for split, rows in used.items():
        if missing := [column for column in (label, *columns) if column not in rows.features]:
            raise UserError(f"the split {split} lacks the column {missing[0]}.")
        if not len(rows):
            raise UserError(f"the split {split} is empty.")
    y, names = _labels(used, label)
    others = [column for column in features if column not in (label, *columns)]
    left_out: dict[str, Any] = {
        "Columns that are left out": [] if images else others,
        "Splits that are left out": [f"{k} ({len(splits[k]):,})" for k in splits if k not in used],
        "Classes without training examples": np.delete(names, np.unique(y[0])),
    }
    notes += [f"{what}: {', '.join(of)}." for what, of in left_out.items() if len(of)]
    if images:
        parts = [_encoded(name, split, rows, columns[0]) for split, rows in used.items()]
        x = in_memory(parts, given.get("image_size"))
    elif side := given.get("image_size"):
        raise UserError(f"--image-size {side}: the examples are not images; leave it out.")
    else:
        x = [_vectors(split, rows, columns) for split, rows in used.items()]
    tested = Examples(x[1], y[1]) if test else None
    about: Any = {"notes": notes, "splits": (train, test or "held out")}
    about["labels"] = f"classes ({', '.join([*names[:3], '…'][: len(names)])})"
    about["dtype"] = np.uint8 if images else None
    return prepared(f"hf:{name}", Examples(x[0], y[0]), tested, len(names), **about)


def _open(name: str) -> tuple[Mapping[str, Any], list[str]]:
    """The splits of a data set, and notes."""
    for module in ("datasets", "PIL"):
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
            found, notes = _open_folder(path)
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


def _open_folder(folder: Path) -> tuple[Mapping[str, Any], list[str]]:
    """The splits in a folder, and a note on files that are not read, which no images may be."""
    import datasets
    from PIL import Image

    if glob.has_magic(str(folder)):
        raise UserError("datasets cannot read folders with *, ? or [ in their path; rename it.")
    builder = datasets.load_dataset_builder(str(folder))
    read = Counter(Path(file) for part in builder.config.data_files.values() for file in part)
    kinds, rest = Image.registered_extensions(), []
    for path in sorted({*read, *folder.rglob("*")}):
        name, times = path.relative_to(folder), read[path]
        hidden = any(part.startswith((".", "__")) for part in name.parts)
        full = path.is_dir() and not path.is_symlink() and any(path.iterdir())
        if hidden or full or times == 1:
            continue
        image = kinds.get(path.suffix.lower()) in FORMATS
        if times or image or path.is_dir() or not path.exists():
            raise UserError(
                f"{name} is {'read twice' if times else 'not read'}: datasets takes names such as "
                "train for splits, and leaves out what is in none, links to folders, and empty "
                "folders; mend, rename or remove it, or hide it by a name with a leading dot."
            )
        rest.append(name)
    for file in read:
        _check_table(file)
    builder.download_and_prepare()
    note = [f"Files that are not read: {len(rest)}, such as {rest[0]}."] if rest else []
    return builder.as_dataset(), note


def _check_table(file: Path) -> None:
    """Raises for a table that Arrow refuses without a name, or whose columns are renamed."""
    names: list[str] = []
    if file.suffix == ".parquet":
        import pyarrow.parquet

        about = pyarrow.parquet.read_metadata(file)
        names = about.schema.to_arrow_schema().names
        if not about.num_rows:
            raise UserError(f"{file} has no rows; fill or remove it.")
    elif file.suffix == ".csv":
        with file.open(newline="", errors="replace") as lines:
            names = next(csv.reader(lines), [])
    for name, count in Counter(names).items():
        if count > 1:
            raise UserError(f"{file} has {count} columns of the name {name}; rename them.")


def _columns(features: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[str, list[str], bool]:
    """The columns of labels and of examples, and whether these are images."""
    label = _pick("label", "ClassLabel", features, given.get("label_column"))
    if label is None:
        raise UserError(
            f"it has no labels; give --label-column, one of {', '.join(features)}, or put images "
            "into one folder for each class, all at one depth."
        )
    rest = {name: feature for name, feature in features.items() if name != label}
    if image := _pick("image", "Image", rest, given.get("image_column")):
        return label, [image], True
    types = {name: str(getattr(feature, "dtype", feature)) for name, feature in rest.items()}
    plain = (name for name, feature in rest.items() if type(feature).__name__ == "Value")
    if numbers := [of for of in plain if types[of].startswith(("int", "uint", "float", "bool"))]:
        return label, numbers, False
    found = ", ".join(f"{name} ({kind})" for name, kind in types.items())
    raise UserError(
        f"it has neither images nor numbers, only {found or 'labels'}; of images as bytes or paths "
        "give --image-column."
    )


def _pick(what: str, kind: str, features: Mapping[str, Any], given: str | None) -> str | None:
    """The requested column, or the only one of its type; ``None`` if there is none."""
    if given is not None and given not in features:
        raise UserError(f"--{what}-column {given}: no such column; {suggest(given, features)}")
    found = [name for name, feature in features.items() if type(feature).__name__ == kind]
    if given is None and len(found) > 1:
        raise UserError(f"it has several {what}s; give --{what}-column, one of {', '.join(found)}.")
    return given or next(iter(found), None)


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


def _encoded(name: str, split: str, rows: Any, column: str) -> Encoded:
    import datasets
    import huggingface_hub

    cells, encoded = rows.select_columns([column]), datasets.Image(decode=False)
    try:
        cells = cells.cast_column(column, encoded)
    except (NotImplementedError, TypeError, ValueError) as error:  # of Arrow
        raise UserError(f"the column {column} of {split} has no images ({error}).") from error
    caches = datasets.config.HF_DATASETS_CACHE, huggingface_hub.constants.HF_HUB_CACHE
    roots = [Path(os.path.expanduser(name)).resolve(), *map(Path, caches)]
    return Encoded(cells.with_format("arrow"), split, roots)


def _vectors(split: str, rows: Any, columns: Sequence[str]) -> np.ndarray:
    vectors = rows.select_columns(columns).to_pandas().to_numpy(float)
    for i, column in enumerate(columns):
        check_array(f"the column {column} of {split}", vectors[:, i : i + 1])
    return np.ascontiguousarray(vectors)
