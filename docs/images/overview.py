# ruff: noqa: RUF001 (the Greek letter in what is drawn)
"""Draws ``overview.png`` from the results of two runs.

Accuracy over epochs is of the first run, accuracy against the time of a step of the second::

    python -m sam_optax compare --out runs/compare
    python -m sam_optax compare --tune --out runs/tuned \
        --methods sgd sam asam rsam fsam looksam msam part every
    python docs/images/overview.py runs/compare runs/tuned docs/images/overview.png
"""

import io
import json
import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from sam_optax.experiments.reporting.axes import styled

NAMES = {
    "sgd": "SGD",
    "sam": "SAM",
    "asam": "ASAM",
    "rsam": "R-SAM",
    "fsam": "F-SAM",
    "every": "SAM every 5th step",
    "looksam": "LookSAM",
    "part": "SAM, ascent on 2 % of the batch",
    "msam": "Momentum-SAM",
}


def main(compare, tuned, out):
    """Draws both panels and writes the figure."""
    figure = Figure(figsize=(10, 4.1), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for method, look in styled(_results(compare)["methods"]):
        runs = 100 * np.array([run["curves"]["test_accuracy"] for run in method["seeds"]])
        epochs, mean, deviation = 1 + np.arange(runs.shape[1]), runs.mean(0), runs.std(0)
        line = {"color": look.color, "linestyle": look.linestyle}
        left.plot(epochs, mean, label=NAMES[method["method"]], **line)
        left.fill_between(epochs, mean - deviation, mean + deviation, color=look.color, alpha=0.15)
    for row, look in styled([m for m in _results(tuned)["methods"] if m["name"] in NAMES]):
        accuracy, name = row["summary"]["test_accuracy"], row["name"]
        y, width = 100 * accuracy["mean"], 100 * (accuracy["interval"] or 0)
        label = NAMES[name] + (f", ρ = {row['hyperparameters']['rho']:g}" if name != "sgd" else "")
        shown = {"markersize": 8, "capsize": 3, "linestyle": "none", "label": label}
        shown |= {"color": look.color, "marker": look.marker}
        right.errorbar(row["step_cost"], y, width, **shown)
    left.set(xlabel="epoch", ylabel="test accuracy (%)", ylim=(91, 98), xlim=(0, None))
    left.set_title("40 % of the training labels are wrong", fontsize="medium")
    right.set(xlabel="time of a training step, relative to SGD", xlim=(0.9, None))
    right.set_title("what each costs, radius and weight decay chosen", fontsize="medium")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right", frameon=False, fontsize="x-small")
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150)
    # A palette of 128 colours is a third of the size and looks the same.
    Image.open(file).convert("RGB").quantize(128).save(out, optimize=True)


def _results(folder):
    return json.loads((Path(folder) / "results.json").read_text())


if __name__ == "__main__":
    main(*sys.argv[1:])
