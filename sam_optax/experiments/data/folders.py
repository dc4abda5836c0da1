"""Folders that ``datasets`` reads: what is in them, against what is read."""

import csv
import glob
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sam_optax.experiments.data.images import FORMATS
from sam_optax.experiments.errors import UserError


def opened(folder: Path) -> tuple[Mapping[str, Any], list[str]]:
    """The splits in a folder, and a note on the files that are not read.

    Raises:
      UserError: images or whole folders are not read, or read twice.
    """
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
