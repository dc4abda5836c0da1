"""Which run it is: everything that the results depend on and a user can choose."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sam_optax.experiments.errors import UserError


def of(description: Mapping[str, Any]) -> dict[str, Any]:
    """The identity of a run, as plain data.

    Args:
      description: of the run, as its results have it.
    """
    return {
        "settings": {name: found["value"] for name, found in description["settings"].items()},
        "methods": {
            method["name"]: {
                **{name: found["value"] for name, found in method["settings"].items()},
                **{f"{method['method']}.{k}": v for k, v in method["hyperparameters"].items()},
            }
            for method in description["methods"]
        },
        "data": description["dataset"]["sha256"],
    }


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """What makes two runs different ones, for a message; empty if nothing does.

    Data are the same if their contents are, wherever they lie.

    Args:
      theirs: identity of the run that was found.
      ours: identity of the run that was asked for.

    Returns:
      Options with both values, as in ``--epochs 60 (now 80)``.
    """
    found, asked = dict(theirs["settings"]), dict(ours["settings"])
    names, now = found.pop("dataset"), asked.pop("dataset")
    text = []
    if theirs["data"] != ours["data"]:
        changed = f"(now {now})" if names != now else "(its contents have changed)"
        text.append(f"--dataset {names} {changed}")
    mine, its = ours["methods"], theirs["methods"]
    if list(mine) != list(its):
        text.append(f"--methods {' '.join(its)} (now {' '.join(mine)})")
    # A setting in which only one of the runs' methods differ is a method's in that run alone.
    both = [({**found, **its[name]}, {**asked, **mine[name]}) for name in its if name in mine]
    pairs = both or [(found, asked)]
    for a, b in pairs:
        for name in {**a, **b}:
            if a.get(name) != b.get(name):
                line = f"--{name.replace('_', '-')} {a.get(name)} (now {b.get(name)})"
                text.append(line)
    return ", ".join(dict.fromkeys(text))


def check_checkpoint(path: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raises :class:`UserError` if a checkpoint is not of the run that is to be continued."""
    if differing := differences(theirs, ours):
        raise UserError(
            f"--resume: {path} is of a run with other settings: {differing}. Give the same ones, "
            "choose another --out, or remove the directory to start again."
        )


def check_results(out: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raises :class:`UserError` if a directory's results are not of the run that was asked for."""
    if differing := differences(theirs, ours):
        raise UserError(
            f"--resume: {out} holds the results of a run with other settings: {differing}. Choose "
            "another --out, or leave out --resume to replace them."
        )
