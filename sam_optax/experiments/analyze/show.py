# ruff: noqa: RUF001 (the papers' Greek letters and mathematical signs, in what is shown)
"""The table and the figures of what ``analyze`` has measured."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from rich.text import Text

from sam_optax import analysis
from sam_optax.experiments.finished import Network
from sam_optax.experiments.reporting.axes import png
from sam_optax.experiments.reporting.console import Console
from sam_optax.experiments.reporting.table import ruled
from sam_optax.experiments.reporting.words import named, plain, variation
from sam_optax.experiments.types import Record

UNITS = {
    "sharpness": "nats, largest rise of the loss found within radius ρ (with m: mean of groups)",
    "adaptive_sharpness": "nats, the same within ρ relative to each weight (element-wise, η = 0, "
    "biases not normalized)",
    "lambda_1": "largest eigenvalue of the Hessian",
    "lambda_ratio": "lambda_1 divided by the fifth largest eigenvalue",
    "residual": "largest residual of these five, relative to lambda_1",
    "start_loss": "nats, at the weights with noise of deviation γ (mean of draws)",
    "cosine": "of the gradients there and after a step of length ρ along it",
    "perturbed_loss": "nats, after that step",
}
DRAWN = ("sharpness", "adaptive_sharpness", "lambda_1", "lambda_ratio")
SYMBOLS = {"rho": "ρ", "gamma": "γ", "value": "mean ± deviation"}


def grouped(rows: Iterable[Record], *names: str) -> dict[tuple[Any, ...], list[Record]]:
    """The rows by the values of some fields."""
    found: dict[tuple[Any, ...], list[Record]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found


def varying(rows: Sequence[Record], *names: str) -> list[str]:
    """The fields that have several values."""
    return [name for name in names if len({row[name] for row in rows} - {None}) > 1]


def values(rows: Iterable[Record]) -> np.ndarray:
    """The values, NaN where they are not finite."""
    return np.array([row["value"] for row in rows], np.float64)


def print_table(rows: Sequence[Record], radii: Sequence[float]) -> None:
    """Prints mean and deviation over the seeds, a line for each measure, method and epoch."""
    shown = [row for row in rows if row["gamma"] is None or row["rho"] in (None, *radii)]
    what = ["measure", *varying(shown, "p", "rho", "gamma")]
    names = [*what, *varying(shown, "run"), "method", *varying(shown, "epoch")]
    table = ruled(*(SYMBOLS.get(name, name) for name in [*names, "value"]))
    for of_what in grouped(shown, *what).values():
        for key, of in grouped(of_what, *names).items():
            seeds = values(of)
            width = seeds.std(ddof=1) if len(seeds) > 1 else np.nan
            table.add_row(*(Text(plain(x)) for x in key), variation(seeds.mean(), width, 3))
        table.add_section()
    for column in table.columns:
        column.overflow = "fold"  # the ends of long paths tell runs apart
    table.columns[-1].justify = "right"
    lines = [f"{name}: {UNITS[name]}" for (name,) in grouped(shown, "measure") if name in UNITS]
    lines.append("on the training set, with the labels trained on; mean ± deviation of the seeds")
    Console().print(table, Text("\n".join(["", *lines]), style="dim"))


def figures(rows: Sequence[Record], sliced: Iterable[Network], data: str) -> dict[str, bytes]:
    """Figures of the numbers, where there are several, and of slices through networks."""
    found, last = _slices(sliced), [row for row in rows if row["last"]]
    for x, chosen in {"epoch": rows, "rho": last}.items():
        for (measure,), of in grouped(chosen, "measure").items():
            if measure in DRAWN and varying(of, x):
                found[f"{measure}_over_{x}"] = _over(x, measure, of)
    if noisy := [row for row in last if row["gamma"] is not None]:
        found["stability"] = _stability(noisy)
    return {f"{name}.png": png(figure, data) for name, figure in found.items()}


def _over(x: str, measure: str, rows: Sequence[Record]) -> Figure:
    """A measure over epochs or radii: a line for each method, the mean of the seeds."""
    names = [*varying(rows, "run"), "method", *(n for n in varying(rows, "p", "rho") if n != x)]
    lines = {}
    for key, of in grouped(rows, *names).items():
        means = {at: values(seeds).mean() for (at,), seeds in grouped(of, x).items()}
        xs, ys = (jnp.array(part) for part in zip(*sorted(means.items()), strict=True))
        lines[", ".join(map(plain, key))] = analysis.LossLine(xs, ys)
    unit = " (nats)" if "sharpness" in measure else ""
    figure = analysis.plot_lines(lines, xlabel=SYMBOLS.get(x, x), ylabel=named(measure) + unit)
    if x == "rho":
        figure.axes[0].set(xscale="log", yscale="log")
    else:
        figure.axes[0].locator_params(axis="x", integer=True)
    return figure


def _stability(rows: Sequence[Record]) -> Figure:
    """Figures 1 and 2 of the R-SAM paper; bands are the seeds."""
    gammas, rhos = ([key for (key,) in grouped(rows, name)] for name in ("gamma", "rho"))
    curves, rhos = {}, rhos[1:]  # the loss at the start has none
    for key, of in grouped(rows, *varying(rows, "run"), "method").items():
        # In the order of measuring: of each network and γ the loss at the start, and two curves.
        parts = values(of).reshape(-1, len(gammas), 1 + 2 * len(rhos)).swapaxes(0, 1)
        start, cosine, loss = map(jnp.array, np.split(parts, [1, 1 + len(rhos)], axis=-1))
        curves[", ".join(key)] = analysis.GradientStability(
            jnp.array(rhos), jnp.array(gammas), cosine, loss, start[..., 0]
        )
    return analysis.plot_stability(curves)


def _slices(networks: Iterable[Network]) -> dict[str, Figure]:
    """Lines and planes through the last networks of the first seed, in the same directions."""
    first = [of for of in networks if of.last and of.seed == of.run.task.seeds[0]]
    several, lines, planes = len({of.run for of in first}) > 1, {}, {}
    fine = np.linspace(-1, 1, 41).tolist()
    for of in first:
        variables = of.load()
        loss, params = of.loss(variables), variables["params"]
        x, y = (analysis.random_direction(params, jax.random.key(i)) for i in range(2))
        name = f"{of.run.directory}, {of.method}" if several else of.method
        lines[name] = analysis.loss_line(loss, params, x, fine)
        planes[name] = analysis.loss_plane(loss, params, x, y, fine[::2], fine[::2])
    if not first:
        return {}
    return {"slices": analysis.plot_lines(lines), "planes": analysis.plot_planes(planes)}
