# ruff: noqa: RUF001 (the papers' Greek letters and mathematical signs, in what is printed)
"""Settings, numbers and names as text, for the terminal, the figures and the page."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from sam_optax.experiments.reporting.stream import printable
from sam_optax.experiments.types import Json

__all__ = ["printable"]
SYMBOLS = {"alpha": "α", "beta": "β", "decay": "β", "eta": "η", "gamma": "γ", "lmbda": "λ"}
SYMBOLS |= {"rho": "ρ", "rho_max": "ρ ≤", "rho_min": "ρ ≥", "sigma": "σ", "theta": "θ"}
_EXTENT = ("epochs", "steps_per_epoch", "batch_size")
_RECIPE: tuple[str, ...] = ("lr", "schedule", "warmup_steps", "momentum", "nesterov", "beta2")
_RECIPE += ("weight_decay", "clip")


def counted(number: int, what: str) -> str:
    """A number of things, such as "2 epochs"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def variation(mean: float, width: float, digits: int = 2, sign: str = "") -> str:
    """A mean with what is on either side of it, where both are known."""
    if math.isnan(mean):
        return "diverged"
    text = f"{mean:{sign}.{digits}f}"
    return text if math.isnan(width) else f"{text} ± {width:.{digits}f}"


class Score(NamedTuple):
    """What the methods are compared by: the accuracy, or a metric of the user's."""

    key: str = "test_accuracy"
    name: str = "accuracy"
    higher_is_better: bool = True
    is_accuracy: bool = True  # or else a function of the user's, whatever its name

    @classmethod
    def of(cls, results: Json) -> "Score":
        """That of a run; runs of earlier versions have the accuracy."""
        return cls(**results.get("metric") or {})

    @property
    def factor(self) -> float:
        """From what is stored to what is shown: shares are shown in percent."""
        return 100 if self.is_accuracy else 1

    @property
    def unit(self) -> str:
        """What is shown behind a number."""
        return "%" if self.is_accuracy else ""

    @property
    def heading(self) -> str:
        """Of a column; with a word before a user's name, which may be that of another column."""
        return self.name if self.is_accuracy else f"test {self.name}"

    @property
    def label(self) -> str:
        """Of an axis."""
        return f"test {self.name}" + f" ({self.unit})" * bool(self.unit)

    def text(self, summary: Mapping[str, float | None], width: str = "std", sign: str = "") -> str:
        """The mean, with its standard deviation where it is known."""
        pair = (math.nan if (x := summary[key]) is None else x for key in ("mean", width))
        mean, around = (self.factor * x for x in pair)
        return variation(mean, around, 2 if self.unit else 4, sign)

    def rank(self, method: Json) -> float:
        """The larger, the better; of what has no mean the lowest of all."""
        mean = method["summary"][self.key]["mean"]
        if mean is None:
            return -math.inf
        return mean if self.higher_is_better else -mean


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
    labels = [f"{100 * noise:g} % wrong training labels"] if noise else []
    return ", ".join([data_name(results), *labels, model])


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
    labels = f"{100 * noise:g} % of the training labels are wrong; " if noise else ""
    examples = f"{dataset['train_examples']} training and {dataset['test_examples']} test examples"
    described = dataset.get("described") or f"{examples}, {dataset['classes']} classes"
    values = {key: {row[key] for row in results["methods"]} for key in _EXTENT}
    extent = [f"{named(key)} {' or '.join(map(str, sorted(of)))}" for key, of in values.items()]
    optimizer = setting(results, "optimizer", "sgd")
    recipe = {name: setting(results, name) for name in _RECIPE}  # None where methods differ
    if not optimizer.startswith("adam"):
        del recipe["beta2"]
    preset = setting(results, "preset")
    texts = [f"{named(name)} {plain(value)}" for name, value in recipe.items() if value]
    return [
        *([f"preset {preset}"] if preset else []),
        f"{printable(dataset['name'])}: {printable(described)}",
        f"{labels}{counted(len(results['seeds']), 'seed')}",
        f"{setting(results, 'model')}; {', '.join(extent)}",
        f"{optimizer}: {', '.join(texts)}",
    ]
