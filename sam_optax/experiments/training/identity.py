"""Which run it is: everything that the results depend on and a user can choose."""

from collections.abc import Mapping
from typing import Any

from sam_optax.experiments.errors import UserError
from sam_optax.experiments.training.task import values


def of(description: Mapping[str, Any]) -> dict[str, Any]:
    """The identity of a run that its description or its results describe, as plain data."""
    return {
        "settings": values(description["settings"]),
        "methods": {
            method["name"]: {
                **values(method["settings"]),
                **{f"{method['method']}.{k}": v for k, v in method["hyperparameters"].items()},
            }
            for method in description["methods"]
        },
        "data": description["dataset"]["sha256"],
    }


def check(theirs: Mapping[str, Any], ours: Mapping[str, Any], what: str, remedy: str) -> None:
    """Raises :class:`UserError` if ``what`` is of another run than the one that is asked for."""
    if found := differences(theirs, ours):
        raise UserError(f"--resume: {what} a run with other settings: {found}. {remedy}")


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Options in which two runs differ, with both values, as in ``--epochs 60 (now 80)``.

    Data are the same if their contents are, wherever they lie.
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
    for a, b in both or [(found, asked)]:
        text += [
            f"--{name.replace('_', '-')} {a.get(name)} (now {b.get(name)})"
            for name in {**a, **b}
            if a.get(name) != b.get(name)
        ]
    return ", ".join(dict.fromkeys(text))
