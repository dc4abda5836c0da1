"""Which run it is: everything that the results depend on and a user can choose."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sam_optax.experiments.errors import UserError
from sam_optax.experiments.methods import Variant
from sam_optax.experiments.task import Task


def of(task: Task, settings: Mapping[str, Any], chosen: Mapping[str, Variant]) -> dict[str, Any]:
    """The identity of a run that is about to begin, as plain data.

    Args:
      task: what is trained on.
      settings: options by name.
      chosen: what is trained, by name; the hyperparameters of others do not matter.
    """
    return {
        "settings": dict(settings),
        "hyperparameters": {name: dict(v.hyperparameters) for name, v in chosen.items()},
        "data": task.dataset.sha256,
    }


def of_results(results: Mapping[str, Any]) -> dict[str, Any]:
    """The identity of the run that results are of."""
    return {
        "settings": results["settings"],
        "hyperparameters": {m["name"]: m["hyperparameters"] for m in results["methods"]},
        "data": results["dataset"].get("sha256"),
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
    found, asked = _options(theirs), _options(ours)
    options = [option for option in {**found, **asked} if option != "--dataset"]
    if found.get("--methods") != asked.get("--methods"):
        # Whose hyperparameters are on one side only goes without saying.
        options = [option for option in options if option in found and option in asked]
    differing = [
        f"{option} {_text(found, option)} (now {_text(asked, option)})"
        for option in options
        if found.get(option) != asked.get(option)
    ]
    if theirs["data"] != ours["data"]:
        name, now = _text(found, "--dataset"), _text(asked, "--dataset")
        changed = f"{name} (now {now})" if name != now else f"{name} (its contents have changed)"
        differing.insert(0, f"--dataset {changed}")
    return ", ".join(differing)


def check_checkpoint(path: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raises :class:`UserError` if a checkpoint is not of the run that is to be continued."""
    if differing := differences(theirs, ours):
        raise UserError(
            f"--resume: {path} is of a run with other settings: {differing}. Give the same ones, "
            "choose another --out, or remove the file to start again."
        )


def check_results(out: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raises :class:`UserError` if a directory's results are not of the run that was asked for."""
    if differing := differences(theirs, ours):
        raise UserError(
            f"--resume: {out} holds the results of a run with other settings: {differing}. Choose "
            "another --out, or leave out --resume to replace them."
        )


def _options(identity: Mapping[str, Any]) -> dict[str, Any]:
    """The options as on the command line."""
    settings = {f"--{k.replace('_', '-')}": v for k, v in identity["settings"].items()}
    methods = identity["hyperparameters"]
    return settings | {f"--{m}.{k}": v for m, values in methods.items() for k, v in values.items()}


def _text(options: Mapping[str, Any], option: str) -> str:
    if option not in options:
        return "absent"
    value = options[option]
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
