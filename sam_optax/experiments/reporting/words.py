"""Settings, numbers and names as text, for the terminal, the figures and the page."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from sam_optax.experiments.reporting.stream import printable as printable
from sam_optax.experiments.types import Json

SYMBOLS = {"alpha": "α", "beta": "β", "decay": "β", "eta": "η", "gamma": "γ", "lmbda": "λ"}
SYMBOLS |= {"rho": "ρ", "rho_max": "ρ ≤", "rho_min": "ρ ≥", "sigma": "σ", "theta": "θ"}
_EXTENT = ("epochs", "steps_per_epoch", "batch_size")
_RECIPE = ["lr", "schedule", "warmup_steps", "momentum", "nesterov", "beta2"]
_RECIPE += ["weight_decay", "clip"]


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
    meaning: str = "share of the test examples that are classified right, after the last epoch"
    heading: str = "accuracy"
    label: str = "test accuracy (%)"
    unit: str = "%"
    factor: float = 100  # from what is stored to what is shown
    digits: int = 2

    @classmethod
    def of(cls, results: Json) -> "Score":
        """That of a run; runs of earlier versions have the accuracy."""
        metric = results.get("metric") or {}
        if metric.get("is_accuracy", True):
            return cls()
        what, name = "mean over the test examples, after the last epoch", metric["name"]
        shown = f"test {name}"  # a name alone may be that of another column
        return cls(metric["key"], name, metric["higher_is_better"], what, shown, shown, "", 1, 4)

    def text(self, summary: Mapping[str, float | None], width: str = "std", sign: str = "") -> str:
        """The mean, with its standard deviation where it is known."""
        pair = (math.nan if (x := summary[key]) is None else x for key in ("mean", width))
        mean, around = (self.factor * x for x in pair)
        return variation(mean, around, self.digits, sign)

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
    values = [f"{symbol(name)} {plain(value)}" for name, value in method["hyperparameters"].items()]
    own = [f"{named(name)} {plain(of['value'])}" for name, of in method["settings"].items()]
    return ", ".join(values + own)


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
    count = len(results["seeds"])
    of = f"mean and {spread} of " if count > 1 else ""
    return f"{task(results)}; {of}{counted(count, 'seed')}"


def settings(description: Json) -> list[list[Any]]:
    """Method ("" for all), name, value and source of each setting and hyperparameter."""
    rows = [["", named(k), of["value"], of["source"]] for k, of in description["settings"].items()]
    for method in description["methods"]:
        name, sources = method["name"], method["sources"]
        own, values = method["settings"].items(), method["hyperparameters"].items()
        rows += [[name, named(k), of["value"], of["source"]] for k, of in own]
        rows += [[name, named(k), x, sources.get(k, "")] for k, x in values]
    return rows


def heading(results: Json) -> list[str]:
    """Data, duration and base optimizer of the training, one line each."""
    data, model, methods = results["dataset"], setting(results, "model"), results["methods"]
    examples = f"{data['train_examples']} training and {data['test_examples']} test examples"
    described = data.get("described") or f"{examples}, {data['classes']} classes"
    noise = setting(results, "label_noise", 0)
    labels = f"{100 * noise:g} % of the training labels are wrong; " if noise else ""
    numbers = {key: sorted({row[key] for row in methods}) for key in _EXTENT}
    extent = [f"{named(key)} {' or '.join(map(str, of))}" for key, of in numbers.items()]
    optimizer, preset = setting(results, "optimizer", "sgd"), setting(results, "preset")
    used = [name for name in _RECIPE if name != "beta2" or optimizer.startswith("adam")]
    values = {name: setting(results, name) for name in used}  # None where methods differ
    recipe = [f"{named(name)} {plain(value)}" for name, value in values.items() if value]
    lines = [
        f"preset {preset}" * bool(preset),
        f"{printable(data['name'])}: {printable(described)}",
        f"{labels}{counted(len(results['seeds']), 'seed')}",
        f"{model}; {', '.join(extent)}",
        f"{optimizer}: {', '.join(recipe)}",
    ]
    return [line for line in lines if line]
