# ruff: noqa: RUF001 (the papers' Greek letters, in help texts and in what is printed)
"""``python -m sam_optax analyze RUN_DIR``: how flat the networks are that ``compare`` trained."""

import csv
import dataclasses
import io
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
import rich.progress
import tyro
from matplotlib.figure import Figure
from rich.console import Console
from rich.text import Text

from sam_optax import analysis
from sam_optax.experiments import compare, evaluation, results
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.options import Compare
from sam_optax.experiments.output import OutputDirectory
from sam_optax.experiments.plots import png
from sam_optax.experiments.table import counted, ruled, variation
from sam_optax.experiments.task import Task, corrupted_labels

FORMAT = "sam_optax.analyze"
BATCH = 500
"""Examples at once."""
ADAPTIVE: dict[str, Any] = {"normalization": "elementwise", "eta": 0.0, "bias_mask": None}
"""How adaptive sharpness is measured: as ASAM trains, biases not normalized, but with η = 0."""
_DIRECTIONS = jax.random.key(0), jax.random.key(1)


@dataclasses.dataclass(frozen=True)
class Analyze:
    """Measures how flat the networks are that compare --out has trained.

    Sharpness, adaptive sharpness and the largest eigenvalues of the Hessian, on the training set
    with the labels trained on, and slices of the loss through the networks of the first seed, all
    on one scale.
    """

    run_dir: Annotated[
        Path,
        tyro.conf.Positional,
        tyro.conf.arg(help="Directory of a finished run of compare --out.", metavar="RUN_DIR"),
    ]
    rho: float = 0.5
    """Radius ρ of sharpness, in units of the weights."""
    adaptive_rho: float = 1.0
    """Radius ρ of adaptive sharpness, relative to the weights."""
    steps: int = 20
    """Ascent steps of the sharpness measures, from each of three starts."""
    lanczos_steps: int = 40
    """Steps of a Lanczos run for the eigenvalues."""
    seeds: int | None = None
    """Number of seeds, from the first. Default: all of the run."""


class Measures(NamedTuple):
    """What is measured of a network; the order of the columns.

    Attributes:
      sharpness: nats, the largest rise of the loss found within the ball of radius ρ.
      adaptive_sharpness: nats, the same within the ball that scales with the weights: element-wise,
        η = 0, biases not normalized. Not invariant where hidden biases are rescaled.
      lambda_1: largest eigenvalue of the Hessian, algebraically.
      lambda_ratio: λ₁/λ₅.
      residual: the largest residual of the five eigenvalues, relative to λ₁.
    """

    sharpness: float
    adaptive_sharpness: float
    lambda_1: float
    lambda_ratio: float
    residual: float


def run(options: Analyze) -> None:
    """Measures, prints a table and writes files into the run's directory.

    Raises:
      UserError: the directory holds no finished run, or an option is out of range.
    """
    _check(options)
    found = results.from_json(options.run_dir / "results.json")
    params_file = options.run_dir / "params.npz"
    if found is None or not params_file.is_file():
        raise UserError(
            f"{options.run_dir}: holds no results.json and params.npz of a finished run; train one "
            "with compare --out."
        )
    task = _task(found)
    seeds = task.seeds[: options.seeds]
    params = results.load_params(params_file)
    losses = _losses(task)
    with OutputDirectory(options.run_dir) as out:
        measured: dict[str, list[Measures]] = {name: [] for name in params}
        for name, i in _progress([(name, i) for name in params for i in range(len(seeds))]):
            weights = jax.tree.map(jax.numpy.asarray, params[name][seeds[i]])
            measured[name].append(_measure(losses[i], weights, options))
        content = _as_data(found, options, seeds, measured)
        files = {
            "analysis.json": (json.dumps(content, indent=1) + "\n").encode(),
            "analysis.csv": _as_csv(seeds, measured),
        }
        drawn = {name: of[seeds[0]] for name, of in params.items() if _all_finite(of[seeds[0]])}
        if drawn:
            files["slices.png"] = png(_lines(losses[0], drawn))
            files["planes.png"] = png(_planes(losses[0], drawn))
        try:
            out.write(files)
        finally:  # where either fails, a full disk or a closed pipe, there is still the other
            _print(found, options, measured)
    Console(highlight=False).print(f"\nThe files are in {options.run_dir}.", soft_wrap=True)


def _check(options: Analyze) -> None:
    for name in ("rho", "adaptive_rho"):
        value = getattr(options, name)
        if not (math.isfinite(value) and value > 0):
            raise UserError(f"--{name.replace('_', '-')} {value:g}: use a number above 0.")
    lowest = {"steps": 1, "lanczos_steps": 5, "seeds": 1}
    for name, least in lowest.items():
        value = getattr(options, name)
        if value is not None and value < least:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} {value}: use an integer of at least {least}.")


def _task(found: Mapping[str, Any]) -> Task:
    """The task of a run, whose data must be what they were."""
    known = {field.name for field in dataclasses.fields(Compare)}
    settings = {k: v for k, v in found["settings"].items() if k in known}
    task = compare.task_of(Compare(**settings))
    if task.dataset.sha256 != found["dataset"].get("sha256"):
        raise UserError(
            f"{found['settings']['dataset']}: its contents have changed since the run; the trained "
            "params no longer belong to it."
        )
    return task


def _losses(task: Task) -> list[analysis.DatasetLoss]:
    """The training loss of each seed, with the labels trained on."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return evaluation.losses(task.model, params, *batch).mean()

    x = task.dataset.x_train
    return [
        analysis.DatasetLoss.from_examples(loss_fn, (x, labels), min(BATCH, len(x)))
        for labels in corrupted_labels(task)
    ]


def _progress(pieces: list[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    console = Console(stderr=True, highlight=False)
    with rich.progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=len(pieces))
        for done, (name, i) in enumerate(pieces):
            bar.update(task, description=f"measuring {name}")
            if not console.is_terminal and i == 0:
                console.print(f"measuring {name}: {100 * done // len(pieces)} % done")
            yield name, i
            bar.advance(task)


def _measure(loss: analysis.DatasetLoss, params: Any, options: Analyze) -> Measures:
    if not _all_finite(params):
        return Measures(*[math.nan] * len(Measures._fields))
    ball = analysis.sharpness(loss, params, options.rho, steps=options.steps)
    adaptive = analysis.adaptive_sharpness(
        loss, params, options.adaptive_rho, steps=options.steps, **ADAPTIVE
    )
    eigen = analysis.hessian_eigenvalues(loss, params, k=5, steps=options.lanczos_steps)
    return Measures(
        float(ball.value),
        float(adaptive.value),
        float(eigen.values[0]),
        float(eigen.ratio(5)),
        float(np.max(np.abs(eigen.residuals)) / abs(eigen.values[0])),
    )


def _as_data(
    found: Mapping[str, Any],
    options: Analyze,
    seeds: tuple[int, ...],
    measured: Mapping[str, list[Measures]],
) -> dict[str, Any]:
    def number(x: float) -> float | None:
        return x if math.isfinite(x) else None

    return {
        "format": FORMAT,
        "format_version": 1,
        "run": {"settings": found["settings"], "sha256": found["dataset"]["sha256"]},
        "options": {**dataclasses.asdict(options), "run_dir": str(options.run_dir)},
        "adaptive_sharpness": {
            "normalization": ADAPTIVE["normalization"],
            "eta": ADAPTIVE["eta"],
            "biases": "not normalized",
        },
        "methods": [
            {
                "name": name,
                "seeds": [
                    {"seed": seed, **{k: number(v) for k, v in one._asdict().items()}}
                    for seed, one in zip(seeds, of, strict=True)
                ],
            }
            for name, of in measured.items()
        ],
    }


def _as_csv(seeds: tuple[int, ...], measured: Mapping[str, list[Measures]]) -> bytes:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["method", "seed", *Measures._fields])
    for name, of in measured.items():
        for seed, one in zip(seeds, of, strict=True):
            writer.writerow([name, seed, *("" if math.isnan(x) else x for x in one)])
    return file.getvalue().encode()


_COLUMNS: dict[str, tuple[str, int]] = {
    "sharpness": ("sharpness\nnats", 3),
    "adaptive_sharpness": ("adaptive\nsharpness\nnats", 3),
    "lambda_1": ("λ₁", 2),
    "lambda_ratio": ("λ₁/λ₅", 2),
}


def _print(
    found: Mapping[str, Any], options: Analyze, measured: Mapping[str, list[Measures]]
) -> None:
    console = Console(highlight=False)
    table = ruled()
    table.add_column("method")
    table.add_column("test accuracy\n%", justify="right")
    for heading, _ in _COLUMNS.values():
        table.add_column(heading, justify="right")
    accuracies = {m["name"]: m["summary"]["test_accuracy"]["mean"] for m in found["methods"]}
    for name, of in measured.items():
        accuracy = accuracies[name]
        cells = [
            _cell([getattr(one, key) for one in of], digits)
            for key, (_, digits) in _COLUMNS.items()
        ]
        table.add_row(name, "–" if accuracy is None else f"{100 * accuracy:.2f}", *cells)
    console.print(table)
    count = len(next(iter(measured.values())))
    residuals = [one.residual for of in measured.values() for one in of]
    known = [x for x in residuals if math.isfinite(x)]
    worst = f"; residuals at most {max(known):.1g} of λ₁" if known else ""
    legend = [
        "all on the training set, with the labels trained on; mean ± deviation of "
        f"{counted(count, 'seed')}",
        f"sharpness: largest rise of the loss found within ‖ε‖ ≤ {options.rho:g}",
        f"adaptive sharpness: within ‖ε/|w|‖ ≤ {options.adaptive_rho:g}, element-wise, η = 0, "
        "biases not normalized",
        f"λ₁, λ₅: eigenvalues of the Hessian{worst}",
    ]
    console.print(Text("\n" + "\n".join(legend)), style="dim")


def _cell(values: list[float], digits: int) -> str:
    finite = [x for x in values if math.isfinite(x)]
    if not finite:
        return "diverged"
    width = float(np.std(finite, ddof=1)) if len(finite) > 1 else math.nan
    return variation(float(np.mean(finite)), width, digits)


def _lines(loss: analysis.DatasetLoss, params: Mapping[str, Any]) -> Figure:
    """Slices along one random filter-normalized direction, the same draw for all."""
    alphas = np.linspace(-1, 1, 41)
    return analysis.plot_lines(
        {
            name: analysis.loss_line(
                loss, w, analysis.random_direction(w, _DIRECTIONS[0]), alphas.tolist()
            )
            for name, w in params.items()
        }
    )


def _planes(loss: analysis.DatasetLoss, params: Mapping[str, Any]) -> Figure:
    """Planes of two such directions, side by side; at most six are drawn."""
    grid = np.linspace(-1, 1, 21).tolist()
    planes = {}
    for name, w in list(params.items())[:6]:
        first, second = (analysis.random_direction(w, key) for key in _DIRECTIONS)
        planes[name] = analysis.loss_plane(loss, w, first, second, grid, grid)
    return analysis.plot_planes(planes)


def _all_finite(tree: Any) -> bool:
    return all(bool(np.all(np.isfinite(leaf))) for leaf in jax.tree.leaves(tree))
