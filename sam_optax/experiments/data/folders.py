"""Folders that ``datasets`` reads: what is in them, against what is read."""

import csv
import glob
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sam_optax.experiments.errors import UserError

_IMAGES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}


def opened(folder: Path) -> tuple[Mapping[str, Any], list[str]]:
    """The splits in a folder, and a note on the files that are not read.

    Raises:
      UserError: images or whole folders are not read, or read twice.
    """
    import datasets

    if glob.has_magic(str(folder)):
        raise UserError("datasets cannot read folders with *, ? or [ in their path; rename it.")
    builder = datasets.load_dataset_builder(str(folder))
    read = Counter(Path(file) for part in builder.config.data_files.values() for file in part)
    rest = []
    for path in sorted({*read, *folder.rglob("*")}):
        if read[path] == 1 or (path.is_dir() and not path.is_symlink() and any(path.iterdir())):
            continue
        name = path.relative_to(folder)
        if any(part.startswith((".", "__")) for part in name.parts):
            continue
        rest.append(name)
        if read[path] or path.is_dir() or not path.exists() or path.suffix.lower() in _IMAGES:
            raise UserError(
                f"{name} is {'read twice' if read[path] else 'not read'}: datasets takes names "
                "such as train for splits, and leaves out what is in none, links to folders, and "
                "empty folders; mend, rename or remove it, or hide it by a name with a leading dot."
            )
    _check_tables(read)
    builder.download_and_prepare()
    note = [f"Files that are not read: {len(rest)}, such as {rest[0]}."] if rest else []
    return builder.as_dataset(), note


def _check_tables(files: Iterable[Path]) -> None:
    """Raises for tables that Arrow refuses without a name, or whose columns are renamed."""
    known: dict[str, Path] = {}
    for file in files:
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
            if known and name not in known:
                first = next(iter(known.values()))
                raise UserError(f"{file} has the column {name}, which {first} lacks; remove it.")
        known = known or dict.fromkeys(names, file)
