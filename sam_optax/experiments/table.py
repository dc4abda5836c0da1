# ruff: noqa: RUF001 (the papers' Greek letters and mathematical signs, in what is printed)
"""The table that a comparison prints."""

import math
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_SYMBOLS = {
    "alpha": "α",
    "beta": "β",
    "decay": "β",
    "eta": "η",
    "gamma": "γ",
    "lmbda": "λ",
    "rho": "ρ",
    "rho_max": "ρ ≤",
    "rho_min": "ρ ≥",
    "sigma": "σ",
    "theta": "θ",
}


def print_results(console: Console, results: Mapping[str, Any]) -> None:
    """Prints what was trained on, a line for each method, and what the columns are."""
    console.print(heading(results))
    table = ruled()
    table.add_column("method")
    table.add_column("with")
    for name in ("test accuracy\n%", "train loss\nnats", "sharpness\nnats", "step cost\n× SGD"):
        table.add_column(name, justify="right")
    for method in results["methods"]:
        summary = method["summary"]
        table.add_row(
            method["name"],
            hyperparameters(method["hyperparameters"]),
            _outcome(method, len(results["seeds"])),
            _mean(summary["train_loss"], 3),
            _mean(summary["sharpness"], 4),
            f"{method['step_cost']:.2f}",
        )
    console.print(table)
    console.print(_legend(results), style="dim")


def ruled() -> Table:
    """An empty table, with a rule below its headings and no frame."""
    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))


def heading(results: Mapping[str, Any]) -> Text:
    """What was trained on, and with which base optimizer."""
    settings, dataset = results["settings"], results["dataset"]
    seeds = len(results["seeds"])
    noise = settings["label_noise"]
    labels = f"{100 * noise:g} % of the training labels are wrong" if noise else "clean labels"
    lines = [
        f"{dataset['name']}: {dataset['train_examples']} training and "
        f"{dataset['test_examples']} test examples, {dataset['classes']} classes",
        f"{labels}; {counted(seeds, 'seed')}",
        f"{settings['model']}; {counted(settings['epochs'], 'epoch')} of "
        f"{counted(results['steps_per_epoch'], 'step')} with batches of {settings['batch_size']}",
        f"SGD: learning rate {settings['lr']:g} (cosine to 0), momentum "
        f"{settings['momentum']:g}, weight decay {settings['weight_decay']:g}",
    ]
    return Text("\n" + "\n".join(lines) + "\n")


def counted(number: int, what: str) -> str:
    """A number of things, in words."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def _outcome(method: Mapping[str, Any], seeds: int) -> str:
    if method["diverged"] == seeds:
        return "diverged"
    accuracy = method["summary"]["test_accuracy"]
    deviation = accuracy["std"]
    text = variation(100 * accuracy["mean"], math.nan if deviation is None else 100 * deviation)
    if method["diverged"]:
        text += f"\n{method['diverged']} of {seeds} diverged"
    return text


def variation(mean: float, width: float, digits: int = 2) -> str:
    """A mean with what is on either side of it, where both are known."""
    if math.isnan(mean):
        return "diverged"
    text = f"{mean:.{digits}f}"
    return text if math.isnan(width) else f"{text} ± {width:.{digits}f}"


def hyperparameters(values: Mapping[str, Any]) -> str:
    """Hyperparameters in the papers' symbols."""
    return ", ".join(f"{_SYMBOLS.get(name, name)} {value:g}" for name, value in values.items())


def _mean(summary: Mapping[str, float | None], digits: int) -> str:
    return "–" if summary["mean"] is None else f"{summary['mean']:.{digits}f}"


def _legend(results: Mapping[str, Any]) -> Text:
    rho = results["settings"]["sharpness_rho"]
    lines = [
        "test accuracy: after the last epoch, on clean labels; mean ± deviation of seeds",
        "train loss:    mean over the training set, with the labels trained on",
        f"sharpness:     L(w + ε) − L(w) on the training set, ε of SAM with ρ {rho:g} for all",
        "step cost:     time of a training step, median ratio over interleaved epochs",
    ]
    if any(method["diverged"] for method in results["methods"]):
        lines.append("diverged:      training loss not finite; the numbers are of the other seeds")
    return Text("\n" + "\n".join(lines))
