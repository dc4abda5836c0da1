"""The identity of a run: all user choices that the results depend on."""

from sam_optax.experiments.errors import UserError
from sam_optax.experiments.training.task import values
from sam_optax.experiments.types import Json, Record


def of(description: Json) -> Record:
    """The identity of a run, from its description or results, as plain data.

    What ``--tune`` has chosen is not a choice of the user's, but what its search starts at is.
    """
    return {
        "settings": values(description["settings"]),
        "methods": {
            method["name"]: {
                **values(method["settings"]),
                **{f"{method['method']}.{k}": v for k, v in method["hyperparameters"].items()},
                **method.get("tune", {}).get("around", {}),
            }
            for method in description["methods"]
        },
        "data": description["dataset"]["sha256"],
    }


def check(theirs: Json, ours: Json, what: str, remedy: str) -> None:
    """Raises :class:`UserError` if ``what`` belongs to another run than the requested one."""
    if found := differences(theirs, ours):
        raise UserError(f"--resume: {what} a run with other settings: {found}. {remedy}")


def differences(theirs: Json, ours: Json) -> str:
    """Options in which two runs differ, with both values, such as ``--epochs 60 (now 80)``.

    Data are equal if their contents are, wherever they are stored.
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
    # A setting may be stored per method in only one of the runs.
    both = [({**found, **its[name]}, {**asked, **mine[name]}) for name in its if name in mine]
    for a, b in both or [(found, asked)]:
        text += [
            f"--{name.replace('_', '-')} {a.get(name)} (now {b.get(name)})"
            for name in {**a, **b}
            if a.get(name) != b.get(name)
        ]
    return ", ".join(dict.fromkeys(text))
