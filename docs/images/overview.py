"""Draws ``overview.png`` from the results of a run.

::

    python -m sam_optax compare --out runs/front \
        --methods sgd sam asam rsam fsam looksam msam part every
    python docs/images/overview.py runs/front docs/images/overview.png
"""

import io
import json
import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from sam_optax.experiments.reporting.axes import by_method, look

NAMES = {
    "sgd": "SGD",
    "sam": "SAM",
    "asam": "ASAM",
    "rsam": "R-SAM",
    "fsam": "F-SAM",
    "every": "SAM every 5th step",
    "looksam": "LookSAM",
    "part": "SAM, ascent on 2 %",
    "msam": "Momentum-SAM",
}


OVER_EPOCHS = ("sgd", "sam", "asam", "rsam", "fsam")


def main(run, out):
    """Draws both panels and writes the figure."""
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    found = json.loads((Path(run) / "results.json").read_text())["methods"]
    methods = [(row, look(i)) for i, rows in by_method(found) for row in rows]
    shown_left = [row for row in methods if row[0]["name"] in OVER_EPOCHS]
    for i, (method, how) in enumerate(shown_left):
        mean = 100 * np.mean(
            [run["curves"]["test_accuracy"] for run in method["seeds"]], 0
        )
        where = (9 + 2 * i, 10)  # no marker hides another
        shown = {"label": NAMES[method["name"]], "markevery": where, **how}
        left.plot(1 + np.arange(len(mean)), mean, **shown)
    left.set(xlabel="epoch", ylabel="test accuracy (%)", ylim=(91, 98), xlim=(0, None))
    left.set_title("test accuracy over epochs, mean of the seeds", fontsize="medium")
    left.legend(loc="lower right", frameon=False)

    rows = sorted(methods, key=lambda row: row[0]["step_cost"])
    for i, (method, how) in enumerate(rows):
        accuracy = method["summary"]["test_accuracy"]
        shown = {
            "color": how["color"],
            "marker": how["marker"],
            "markersize": 8,
            "capsize": 3,
        }
        right.errorbar(
            100 * accuracy["mean"], i, xerr=100 * (accuracy["interval"] or 0), **shown
        )
    names = [f"{_name(row)}  {row['step_cost']:.2f} ×" for row, _ in rows]
    right.set_yticks(range(len(rows)), names)
    right.invert_yaxis()
    right.set(xlabel="test accuracy (%) after the last epoch")
    right.set_title("time of a step (SGD: 1), accuracy", fontsize="medium")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150)
    # A palette of 128 colours is a third of the size and looks the same.
    Image.open(file).convert("RGB").quantize(128).save(out, optimize=True)


def _name(method):
    rho = method["hyperparameters"].get("rho")
    return NAMES[method["name"]] + ("" if rho is None else f", ρ = {rho:g}")


if __name__ == "__main__":
    main(*sys.argv[1:])
