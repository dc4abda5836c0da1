# ruff: noqa: RUF001 (the papers' Greek letters, in help texts and in what is printed)
"""``python -m sam_optax analyze RUN_DIR``: the sharpness of the networks of a run."""

import collections
import csv
import dataclasses
import io
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.text import Text

from sam_optax import analysis
from sam_optax.experiments.finished import dataset_losses, open_run
from sam_optax.experiments.options.declare import (
    COUNT,
    POSITIVE,
    at_least,
    check,
    declared,
    option,
)
from sam_optax.experiments.reporting import palette
from sam_optax.experiments.reporting.axes import png
from sam_optax.experiments.reporting.figures import over_epochs
from sam_optax.experiments.reporting.output import OutputDirectory
from sam_optax.experiments.reporting.progress import Progress
from sam_optax.experiments.reporting.results import number
from sam_optax.experiments.reporting.table import ruled
from sam_optax.experiments.reporting.words import counted, printable, variation
from sam_optax.experiments.training.measures import MEASURED
from sam_optax.experiments.training.task import noisy_labels

ADAPTIVE: dict[str, Any] = {"normalization": "elementwise", "eta": 0.0, "bias_mask": None}
"""How adaptive sharpness is measured: as ASAM trains, biases not normalized, but with η = 0.
It is not invariant where hidden biases are rescaled."""
MEASURES = ("sharpness", "adaptive_sharpness", "lambda_1", "lambda_ratio", "residual")
_COLUMNS = {
    "sharpness": ("sharpness\nnats", 3),
    "adaptive_sharpness": ("adaptive\nsharpness\nnats", 3),
    "lambda_1": ("λ₁", 2),
    "lambda_ratio": ("λ₁/λ₅", 2),
}


@dataclasses.dataclass(frozen=True)
@declared
class Analyze:
    """Measures the sharpness of the networks that compare --out or train --out has trained.

    Reports sharpness, adaptive sharpness and the largest eigenvalues of the Hessian on the
    training set (at most 10,000 examples) with the labels used in training, of all networks that
    --save-every has kept, over epochs. Draws slices of the loss through the last networks of the
    first seed, all on one scale.
    """

    run_dir: Annotated[
        Path,
        tyro.conf.Positional,
        tyro.conf.arg(help="Directory of --out of a finished run.", metavar="RUN_DIR"),
    ]
    rho: float = option(0.5, POSITIVE)
    """Radius ρ of sharpness, in units of the weights."""
    adaptive_rho: float = option(1.0, POSITIVE)
    """Radius ρ of adaptive sharpness, relative to the weights."""
    steps: int = option(20, COUNT)
    """Ascent steps of the sharpness measures, from each of three starts."""
    lanczos_steps: int = option(40, at_least(5))
    """Steps of each Lanczos run for the eigenvalues."""
    seeds: int | None = option(None, COUNT)
    """Number of seeds to measure, from the first. Default: all seeds of the run."""

    def __post_init__(self) -> None:
        check(self)


def run(options: Analyze) -> None:
    """Measures the networks, writes files to the run's directory and prints a table."""
    opened = open_run(options.run_dir)
    found, task = opened.results, opened.task
    seeds = task.seeds[: options.seeds]
    networks = [network for network in opened.networks if network.seed in seeds]
    losses = dataset_losses(task, task.dataset.train)
    labels = dict(zip(seeds, noisy_labels(task, seeds), strict=True))
    with OutputDirectory(options.run_dir) as out:
        counts = collections.Counter(network.name for network in networks)
        work = {name: (1.0, count) for name, count in counts.items()}
        measured: dict[str, list[dict[str, Any]]] = {name: [] for name in counts}
        with Progress(Console(stderr=True, highlight=False), work, "measuring") as progress:
            for network in networks:
                start, variables = time.perf_counter(), network.load()
                loss = losses(labels[network.seed], variables)
                values = _measure(loss, variables["params"], options)
                row = {"seed": network.seed, "epoch": network.epoch, **values}
                measured[network.name].append(row)
                progress.done(network.name, time.perf_counter() - start)
        methods = [{"name": name, "networks": rows} for name, rows in measured.items()]
        try:
            out.write(_files(found, options, methods))
            if not all(network.last for network in networks):
                out.write({"epochs.png": _over_epochs(found, methods)})
            first = {n.name: n.load() for n in networks if n.last and n.seed == seeds[0]}
            drawn = {name: (losses(labels[seeds[0]], v), v) for name, v in first.items()}
            out.write(_figures(found, drawn))
        finally:  # where either fails, a full disk or a closed pipe, there is still the other
            _print(found, options, methods)
    path = printable(str(options.run_dir))
    Console(highlight=False).print(Text(f"\nThe files are in {path}."), soft_wrap=True)


def _measure(loss: analysis.DatasetLoss, params: Any, options: Analyze) -> dict[str, Any]:
    """What ``MEASURES`` names: nats, nats, an eigenvalue, a ratio, and a share of λ₁."""
    if not _all_finite(params):
        return dict.fromkeys(MEASURES)
    params = jax.tree.map(jnp.asarray, params)
    ball = analysis.sharpness(loss, params, options.rho, steps=options.steps)
    adaptive = analysis.adaptive_sharpness(
        loss, params, options.adaptive_rho, steps=options.steps, **ADAPTIVE
    )
    eigen = analysis.hessian_eigenvalues(loss, params, k=5, steps=options.lanczos_steps)
    residual = np.max(np.abs(eigen.residuals)) / abs(eigen.values[0])
    values = ball.value, adaptive.value, eigen.values[0], eigen.ratio(5), residual
    return {name: number(float(x)) for name, x in zip(MEASURES, values, strict=True)}


def _files(
    found: Mapping[str, Any], options: Analyze, methods: list[dict[str, Any]]
) -> dict[str, bytes]:
    content = {
        "format": "sam_optax.analyze",
        "format_version": 2,
        "run": {"settings": found["settings"], "sha256": found["dataset"]["sha256"]},
        "options": {**dataclasses.asdict(options), "run_dir": str(options.run_dir)},
        "adaptive_sharpness": {
            **{key: ADAPTIVE[key] for key in ("normalization", "eta")},
            "biases": "not normalized",
        },
        "methods": methods,
    }
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow(["method", "seed", "epoch", *MEASURES])
    for method in methods:
        writer.writerows([[method["name"], *row.values()] for row in method["networks"]])
    return {
        "analysis.json": (json.dumps(content, indent=1, allow_nan=False) + "\n").encode(),
        "analysis.csv": lines.getvalue().encode(),
    }


def _print(found: Mapping[str, Any], options: Analyze, methods: list[dict[str, Any]]) -> None:
    table = ruled()
    table.add_column("method")
    for heading in ("epoch", "test accuracy\n%", *(heading for heading, _ in _COLUMNS.values())):
        table.add_column(heading, justify="right")
    for method, of in zip(methods, found["methods"], strict=True):
        for epoch in dict.fromkeys(row["epoch"] for row in method["networks"]):
            rows = [row for row in method["networks"] if row["epoch"] == epoch]
            curves = [s["curves"]["test_accuracy"] for s in of["seeds"] if not s["diverged"]]
            accuracy = f"{100 * np.mean([c[epoch - 1] for c in curves]):.2f}" if curves else "–"
            cells = [_cell(rows, key, digits) for key, (_, digits) in _COLUMNS.items()]
            table.add_row(Text(method["name"]), str(epoch), accuracy, *cells)
    console = Console(highlight=False)
    console.print(table)
    residuals = [row["residual"] for method in methods for row in method["networks"]]
    residuals = [x for x in residuals if x is not None]
    worst = f"; residuals at most {max(residuals):.1g} of λ₁" if residuals else ""
    examples = found["dataset"]["train_examples"]
    some = f"{MEASURED:,} examples of " if examples > MEASURED else ""
    legend = [
        f"all on {some}the training set, with the labels trained on; mean ± deviation of "
        f"{counted(len({row['seed'] for row in methods[0]['networks']}), 'seed')}",
        f"sharpness: largest rise of the loss found within ‖ε‖ ≤ {options.rho:g}",
        f"adaptive sharpness: within ‖ε/|w|‖ ≤ {options.adaptive_rho:g}, element-wise, η = 0, "
        "biases not normalized",
        f"λ₁, λ₅: eigenvalues of the Hessian{worst}",
    ]
    console.print(Text("\n" + "\n".join(legend)), style="dim")


def _cell(rows: list[dict[str, Any]], key: str, digits: int) -> str:
    values = [row[key] for row in rows if row[key] is not None]
    width = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
    return variation(float(np.mean(values)), width, digits) if values else "diverged"


def _over_epochs(found: Mapping[str, Any], methods: list[dict[str, Any]]) -> bytes:
    """What the table shows, as curves."""
    labels = {
        key: heading.replace("\nnats", " (nats)").replace("\n", " ")
        for key, (heading, _) in _COLUMNS.items()
    }
    drawn = []
    for method, of in zip(methods, found["methods"], strict=True):
        curves: dict[int, dict[str, list[float | None]]] = {}
        for row in method["networks"]:
            empty: dict[str, list[float | None]] = {key: [None] * of["epochs"] for key in labels}
            for key, values in curves.setdefault(row["seed"], empty).items():
                values[row["epoch"] - 1] = row[key]
        drawn.append({**of, "seeds": [{"curves": of_seed} for of_seed in curves.values()]})
    return over_epochs({**found, "methods": drawn, "seeds": [*curves]}, labels, (10, 6.4))


def _figures(
    found: Mapping[str, Any], networks: Mapping[str, tuple[analysis.DatasetLoss, Any]]
) -> dict[str, bytes]:
    """Slices along lines (all networks) and planes (at most six), in the same random directions."""
    grid, alphas = np.linspace(-1, 1, 21).tolist(), np.linspace(-1, 1, 41).tolist()
    lines: dict[str, analysis.LossLine] = {}
    planes: dict[str, analysis.LossPlane] = {}
    for name, (loss, variables) in networks.items():
        params = jax.tree.map(jnp.asarray, variables["params"])
        if not _all_finite(params):
            continue
        x, y = (analysis.random_direction(params, jax.random.key(i)) for i in range(2))
        lines[name] = analysis.loss_line(loss, params, x, alphas)
        if len(planes) < 6:
            planes[name] = analysis.loss_plane(loss, params, x, y, grid, grid)
    if not lines:
        return {}
    figure = analysis.plot_lines(lines)
    methods = {m["name"]: m["method"] for m in found["methods"]}
    styles = palette.styles([methods[name] for name in lines])
    for line, style in zip(figure.axes[0].lines, styles, strict=True):
        line.set(color=style.color, linestyle=style.linestyle)
    if len(lines) > 1:
        figure.axes[0].legend(frameon=False)
    return {"slices.png": png(figure), "planes.png": png(analysis.plot_planes(planes))}


def _all_finite(tree: Any) -> bool:
    return all(bool(np.all(np.isfinite(leaf))) for leaf in jax.tree.leaves(tree))
