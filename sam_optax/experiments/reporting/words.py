"""Settings, numbers and names as text, for the terminal, the figures and the page."""

import math
from typing import Any, NamedTuple

from sam_optax.experiments.reporting.stream import printable
from sam_optax.experiments.types import Json

SYMBOLS = {"alpha": "α", "beta": "β", "decay": "δ", "eta": "η", "gamma": "γ", "lmbda": "λ"}
SYMBOLS |= {"rho": "ρ", "rho_max": "ρ_max", "rho_min": "ρ_min", "sigma": "σ", "theta": "θ"}
_EXTENT = ("epochs", "steps_per_epoch", "batch_size")
_RECIPE = ["lr", "schedule", "warmup_steps", "momentum", "nesterov", "beta2"]
_RECIPE += ["weight_decay", "clip"]


def variation(
    summary: Json,
    digits: int = 2,
    factor: float = 1,
    width: str = "std",
    sign: str = "",
    unknown: str = "–",
) -> str:
    """The mean of a summary, with what is on either side of it (``width``) where it is known."""
    mean, around = (summary.get(key) for key in ("mean", width))
    if mean is None:
        return unknown
    text = f"{factor * mean:{sign}.{digits}f}"
    return text if around is None else f"{text} ± {factor * around:.{digits}f}"


class Score(NamedTuple):
    """What the methods are compared by: the accuracy, or a metric of the user's."""

    key: str = "test_accuracy"
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
        what = "mean over the test examples, after the last epoch"
        shown = f"test {metric['name']}"  # a name alone may be that of another column
        return cls(metric["key"], metric["higher_is_better"], what, shown, shown, "", 1, 4)

    def text(self, summary: Json, **how: Any) -> str:
        """As :func:`variation`, in the unit and with the digits of the score."""
        return variation(summary, self.digits, self.factor, **how)

    def shown(self, method: Json) -> tuple[float, float]:
        """The mean and half its interval in the unit of the score; NaN and 0 if not known."""
        summary = method["summary"][self.key]
        mean = math.nan if summary["mean"] is None else summary["mean"]
        return self.factor * mean, self.factor * (summary["interval"] or 0)

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


def symbol(hyperparameter: str) -> str:
    """The papers' letter for a hyperparameter, or its name."""
    return SYMBOLS.get(hyperparameter, named(hyperparameter))


def trained_with(method: Json) -> str:
    """The hyperparameters of a method, and its settings that differ between methods."""
    values = [f"{symbol(name)} {plain(value)}" for name, value in method["hyperparameters"].items()]
    own = [f"{named(name)} {plain(of['value'])}" for name, of in method["settings"].items()]
    return ", ".join(values + own)


def setting(results: Json, name: str, default: Any = None) -> Any:
    """The value of a shared setting, or the default if there is none."""
    value = results["settings"].get(name, {}).get("value")
    return default if value is None else value


def used(results: Json, name: str) -> bool:
    """Whether a shared setting (by :func:`named`) has an effect in a run with these others."""
    return name != "beta2" or setting(results, "optimizer", "adam").startswith("adam")


def settings(description: Json) -> list[list[Any]]:
    """Method ("" for all), name, value and source of each setting and hyperparameter."""
    rows = [["", named(k), of["value"], of["source"]] for k, of in description["settings"].items()]
    for method in description["methods"]:
        name, sources = method["name"], method.get("sources", {})
        own, values = method["settings"].items(), method["hyperparameters"].items()
        rows += [[name, named(k), of["value"], of["source"]] for k, of in own]
        rows += [[name, named(k), x, sources.get(k, "")] for k, x in values]
    return rows


def task(results: Json) -> str:
    """The task in a few words; of a long name of the data the end."""
    name, noise = printable(results["dataset"]["name"]), setting(results, "label_noise", 0)
    name = name if len(name) <= 48 else f"…{name[-47:]}"
    labels = [f"{100 * noise:g} % wrong training labels"] if noise else []
    return ", ".join([name, *labels, setting(results, "model")])


def title(results: Json, spread: str = "95 % confidence interval") -> str:
    """The task, and what is drawn of the seeds."""
    several = f"mean and {spread} of " if len(results["seeds"]) > 1 else ""
    return f"{task(results)}; {several}{_seeds(results)}"


def heading(results: Json) -> list[str]:
    """Data, duration and base optimizer of the training, one line each."""
    data, model, methods = results["dataset"], setting(results, "model"), results["methods"]
    noise = setting(results, "label_noise", 0)
    labels = f"{100 * noise:g} % of the training labels are wrong; " if noise else ""
    numbers = {key: sorted({row[key] for row in methods}) for key in _EXTENT}
    extent = [f"{named(key)} {' or '.join(map(str, of))}" for key, of in numbers.items()]
    # A setting in which methods differ has no value here.
    values = {name: setting(results, name) for name in _RECIPE if used(results, name)}
    recipe = [f"{named(name)} {plain(value)}" for name, value in values.items() if value]
    preset = setting(results, "preset")
    return [
        *([f"preset {preset}"] if preset else []),
        f"{printable(data['name'])}: {printable(data.get('described', ''))}",
        f"{labels}{_seeds(results)}",
        f"{model}; {', '.join(extent)}",
        f"{setting(results, 'optimizer', 'sgd')}: {', '.join(recipe)}",
    ]


def _seeds(results: Json) -> str:
    count = len(results["seeds"])
    return f"{count} seed{'s' * (count != 1)}"
