"""The identity of a run: all user choices that the results depend on."""

from sam_optax.experiments.errors import UserError
from sam_optax.experiments.named import short
from sam_optax.experiments.training.task import values
from sam_optax.experiments.types import Json, Record

FILES = {"model_sha256": "--model", "methods_sha256": "--methods"}
"""The digests among the settings, with the options that name their files."""


def of(description: Json) -> Record:
    """The identity of a run, from its description or results; of ``--tune``, what it starts at."""
    shared, methods = values(description["settings"]), {}
    data = [shared.pop("dataset"), description["dataset"]["sha256"]]
    for row in description["methods"]:
        own = {f"{short(row['method'])}.{k}": v for k, v in row["hyperparameters"].items()}
        around = row.get("tune", {}).get("around", {})
        methods[row["name"]] = {**shared, **values(row["settings"]), **own, **around}
    return {"data": data, "methods": methods}


def check(theirs: Json, ours: Json, what: str) -> None:
    """Raises :class:`UserError`, naming the options that differ, if ``what`` is of another run.

    Data are equal if their contents are, wherever they are stored.
    """
    text, ((name, sha256), (now, other)) = [], (theirs["data"], ours["data"])
    if sha256 != other:
        changed = f"(now {now})" if name != now else "(its contents have changed)"
        text.append(f"--dataset {name} {changed}")
    its, mine = theirs["methods"], ours["methods"]
    if list(mine) != list(its):
        text.append(f"--methods {' '.join(its)} (now {' '.join(mine)})")
    for method in (method for method in its if method in mine):
        a, b = dict(its[method]), mine[method]
        if sha256 == other:  # sizes of images are in the data; earlier versions had one for all
            a["image_size"] = b.get("image_size")
        for option in (option for option in {**a, **b} if a.get(option) != b.get(option)):
            changed = f"--{option.replace('_', '-')} {a.get(option)} (now {b.get(option)})"
            file = FILES.get(option)
            text.append(f"the file of {file} has changed" if file else changed)
    if text:
        found = f"{', '.join(dict.fromkeys(text))}. Give the same ones, or choose another --out."
        raise UserError(f"--resume: {what} a run with other settings: {found}")
