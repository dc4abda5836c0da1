# ruff: noqa: RUF001 (the papers' Greek letters and mathematical signs, in what is printed)
"""Settings, numbers and names as text, for the terminal, the figures and the page."""

import math
from collections.abc import Mapping
from typing import Any

from sam_optax.experiments.reporting.stream import printable
from sam_optax.experiments.types import Json

__all__ = ["printable"]
SYMBOLS = {"alpha": "α", "beta": "β", "decay": "β", "eta": "η", "gamma": "γ", "lmbda": "λ"}
SYMBOLS |= {"rho": "ρ", "rho_max": "ρ ≤", "rho_min": "ρ ≥", "sigma": "σ", "theta": "θ"}
_OPTIMIZER: tuple[str, ...] = (
    "lr",
    "schedule",
    "warmup_steps",
    "momentum",
    "nesterov",
    "beta2",
    "weight_decay",
)
_OPTIMIZER += ("clip",)


def counted(number: int, what: str) -> str:
    """A number of things, such as "2 epochs"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def variation(mean: float, width: float, digits: int = 2, sign: str = "") -> str:
    """A mean with what is on either side of it, where both are known."""
    if math.isnan(mean):
        return "diverged"
    text = f"{mean:{sign}.{digits}f}"
    return text if math.isnan(width) else f"{text} ± {width:.{digits}f}"


def percent(summary: Mapping[str, float | None], width: str = "std", sign: str = "") -> str:
    """The mean of a share in percent, with its standard deviation where it is known."""
    mean, around = (math.nan if (x := summary[key]) is None else 100 * x for key in ("mean", width))
    return variation(mean, around, sign=sign)


def duration(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def plain(value: Any) -> str:
    """The value of a setting."""
    if isinstance(value, list | tuple):
        return ", ".join(map(plain, value))
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def named(setting: str) -> str:
    """The name of a setting."""
    return setting.replace("_", " ")


def trained_with(method: Json) -> str:
    """The hyperparameters of a method, and its settings that differ between methods."""
    own = [f"{named(name)} {plain(s['value'])}" for name, s in method["settings"].items()]
    values = method["hyperparameters"].items()
    return ", ".join([*(f"{symbol(name)} {plain(value)}" for name, value in values), *own])


def symbol(hyperparameter: str) -> str:
    """The papers' letter for a hyperparameter, or its name."""
    return SYMBOLS.get(hyperparameter, named(hyperparameter))


def setting(results: Json, name: str, default: Any = None) -> Any:
    """The value of a shared setting, or the default if there is none."""
    value = results["settings"].get(name, {}).get("value")
    return default if value is None else value


def data_name(results: Json, longest: int = 48) -> str:
    """The name of the data set, its end if it is long."""
    name = printable(results["dataset"]["name"])
    return name if len(name) <= longest else "…" + name[1 - longest :]


def task(results: Json) -> str:
    """The task in a few words."""
    noise, model = setting(results, "label_noise", 0), setting(results, "model")
    if results["dataset"].get("text"):
        return f"{data_name(results)}, {model}"
    labels = f"{100 * noise:g} % wrong training labels" if noise else "clean labels"
    return f"{data_name(results)}, {labels}, {model}"


def title(results: Json, spread: str = "95 % confidence interval") -> str:
    """The task, and what is drawn of the seeds."""
    seeds = counted(len(results["seeds"]), "seed")
    of = f"mean and {spread} of {seeds}" if len(results["seeds"]) > 1 else seeds
    return f"{task(results)}; {of}"


def settings(description: Json) -> list[list[Any]]:
    """Method ("" for all), name, value and source of each setting and hyperparameter."""
    rows = [["", named(k), of["value"], of["source"]] for k, of in description["settings"].items()]
    for method in description["methods"]:
        sources, own = method["sources"], method["settings"].items()
        rows += [[method["name"], named(k), of["value"], of["source"]] for k, of in own]
        values = method["hyperparameters"].items()
        rows += [[method["name"], named(k), x, sources.get(k, "")] for k, x in values]
    return rows


def heading(results: Json) -> list[str]:
    """Data, duration and base optimizer of the training, one line each."""
    dataset, noise = results["dataset"], setting(results, "label_noise", 0)
    labels = f"{100 * noise:g} % of the training labels are wrong; " if noise else "clean labels; "
    kind = f"{dataset['classes']} classes"
    if dataset.get("text"):
        most = "at most " if dataset["name"].startswith("pairs:") else ""
        labels, kind = "", f"{most}{dataset['example_shape'][0]} bytes each"
    lines = [f"preset {preset}"] if (preset := setting(results, "preset")) else []
    lines += [
        f"{printable(dataset['name'])}: {dataset['train_examples']} training and "
        f"{dataset['test_examples']} test examples, {kind}",
        f"{labels}{counted(len(results['seeds']), 'seed')}",
        f"{setting(results, 'model')}; {_extent(results)}",
        _optimizer(results),
    ]
    if (scale := setting(results, "scale", 1)) != 1:
        lines.append(f"scaled down (--scale {scale:g}): not to be compared with full runs")
    return lines


def _extent(results: Json) -> str:
    kinds = ("epochs", "steps_per_epoch", "batch_size")
    epochs, steps, batch = ({method[kind] for method in results["methods"]} for kind in kinds)
    text = counted(epochs.pop(), "epoch") if len(epochs) == 1 else "epochs as below"
    if len(steps) == 1:
        text += f" of {counted(steps.pop(), 'step')}"
    return f"{text} with batches of {batch.pop()}" if len(batch) == 1 else text


def _optimizer(results: Json) -> str:
    """The base optimizer with the settings that all methods share, those without effect left out.

    They have the names of their options.
    """
    optimizer = setting(results, "optimizer", "sgd")
    values = {name: setting(results, name) for name in _OPTIMIZER}
    values["beta2"] = values["beta2"] if optimizer.startswith("adam") else None
    texts = [f"{named(name)} {plain(value)}" for name, value in values.items() if value]
    return f"{optimizer}: {', '.join(texts)}"
