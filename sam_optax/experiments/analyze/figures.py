# ruff: noqa: RUF001 (the papers' Greek letters and mathematical signs, in what is drawn)
"""The figures of what is measured: over epochs, over radii, stability, and slices of the loss."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from sam_optax import analysis
from sam_optax.experiments.analyze.measures import (
    RISES,
    Measured,
    Quantity,
    all_finite,
    stability_radii,
)
from sam_optax.experiments.analyze.options import Analyze
from sam_optax.experiments.analyze.table import headings, short
from sam_optax.experiments.finished import Losses
from sam_optax.experiments.reporting import words
from sam_optax.experiments.reporting.axes import Style, legend, png, styles, tidy
from sam_optax.experiments.reporting.figures import over_epochs

SNAPSHOTS, PANELS = 3, 6
"""How many snapshots there are slices of besides the last networks, and panels of methods."""


def of_numbers(options: Analyze, measured: Sequence[Measured]) -> dict[str, bytes]:
    """The figures that show the numbers, those that suit them."""
    last = [of for of in measured if of.network.last]
    found = {}
    labels: dict[str, tuple[Quantity, str]] = {}
    for what, heading in headings(options).items():  # of each measure the first norm and radius
        text = heading.replace("\nnats", " (nats)").replace("\n", " ")
        labels.setdefault(what.measure, (what, text))
    if labels and len(last) < len(measured):
        found["epochs.png"] = _epochs(dict(labels.values()), measured)
    panels = [
        (measure, p, radii)
        for measure, radii in zip(RISES, (options.rho, options.adaptive_rho), strict=True)
        for p in options.p
        if len(radii) > 1 and measure in options.measures
    ]
    if panels:
        found["radii.png"] = _radii(panels, last)
    if "stability" in options.measures:
        found |= _stability(options, last)
    return found


def _by_title(measured: Sequence[Measured]) -> dict[str, list[Measured]]:
    """The networks of each method of each run."""
    found: dict[str, list[Measured]] = {}
    for of in measured:
        found.setdefault(of.title, []).append(of)
    return found


def _looks(groups: dict[str, list[Measured]]) -> dict[str, Style]:
    entries = [(of[0].network.run.task.entries, of[0].network.name) for of in groups.values()]
    methods = [entries[name].method for entries, name in entries]
    return dict(zip(groups, styles(methods), strict=True))


def _title(measured: Sequence[Measured], text: str) -> str:
    """What all runs share, and a text."""
    results = measured[0].network.run.results
    return f"{words.data_name(results) if measured[0].run else words.task(results)}; {text}"


def _epochs(labels: dict[Quantity, str], measured: Sequence[Measured]) -> bytes:
    """What the table shows, as curves."""
    drawn = []
    for title, members in _by_title(measured).items():
        task, name = members[0].network.run.task, members[0].network.name
        curves: dict[int, dict[str, list[float | None]]] = {}
        for of in members:
            none = {text: [None] * task.entries[name].recipe.epochs for text in labels.values()}
            curve: Any = curves.setdefault(of.network.seed, none)  # type: ignore[arg-type]
            for what, text in labels.items():
                curve[text][of.network.epoch - 1] = of.values[what]
        seeds = [{"curves": of_seed} for of_seed in curves.values()]
        drawn.append({"name": title, "method": task.entries[name].method, "seeds": seeds})
    texts = {text: text for text in labels.values()}
    title = _title(measured, "mean and standard deviation of the seeds")
    return over_epochs(drawn, texts, (10, 3.2 * -(-len(texts) // 2)), title)


def _radii(panels: Sequence[tuple[str, float, Sequence[float]]], last: Sequence[Measured]) -> bytes:
    """Sharpness over the radius: a panel for each measure and norm."""
    groups = _by_title(last)
    figure = Figure(figsize=(1 + 4.2 * len(panels), 4.2), layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (measure, p, radii) in zip(grid, panels, strict=True):
        for (title, members), look in zip(groups.items(), _looks(groups).values(), strict=True):
            asked = [Quantity(measure, p, rho) for rho in sorted(radii)]
            rows = [[of.values[what] for what in asked] for of in members]
            values = np.ma.masked_invalid(np.array(rows, float))
            mean, deviation = values.mean(0), values.std(0)
            axes.plot(sorted(radii), mean, label=title, markersize=4, **look._asdict())
            area = sorted(radii), mean - deviation, mean + deviation
            axes.fill_between(*area, color=look.color, alpha=0.15)
        unit = "relative to" if measure == "adaptive_sharpness" else "in units of"
        kind = f"{words.named(measure)} (nats), p = {short(p)}"
        axes.set(xlabel=f"radius ρ, {unit} the weights", ylabel=kind)
        axes.set(xscale="log", yscale="log")
        axes.set_xticks(sorted(radii), map(short, sorted(radii)))
        axes.set_xticks([], minor=True)
        tidy(axes)
    legend(figure, grid[0])
    text = "after the last epoch; mean and standard deviation of the seeds"
    return png(figure, _title(last, text))


def _stability(options: Analyze, last: Sequence[Measured]) -> dict[str, bytes]:
    """Figures 1 and 2 of the R-SAM paper, rows for the first methods; bands are the seeds."""
    rhos = stability_radii(options)
    curves: dict[str, analysis.GradientStability] = {}
    for title, members in _by_title(last).items():
        rows = [[x for what, x in of.values.items() if what.gamma is not None] for of in members]
        if not (fine := [row for row in rows if None not in row]) or len(curves) == PANELS:
            continue
        # In the order of quantities(): of each γ the loss at the start, then both curves.
        numbers = np.array(fine, np.float32).reshape(len(fine), len(options.gamma), -1)
        start, cosine, loss = np.split(numbers.swapaxes(0, 1), [1, 1 + len(rhos)], axis=-1)
        found = rhos, options.gamma, cosine, loss, start[..., 0]
        curves[title] = analysis.GradientStability(*map(jnp.asarray, found))
    if not curves:
        return {}
    figure = analysis.plot_stability(curves)
    for axes in figure.axes[1::2]:
        chance = np.log(last[0].network.run.task.dataset.classes)
        axes.axhline(chance, color="0.5", linestyle=":")
        axes.annotate("guessing", (1, chance), xycoords=("axes fraction", "data"), ha="right")
    return {"stability.png": png(figure, _title(last, f"noise {options.noise_scale}"))}


def slices(losses: Losses, measured: Sequence[Measured]) -> dict[str, bytes]:
    """Slices of the loss of the first seed's networks, in the same random directions.

    Lines of all methods, at the end and at a few epochs before, and planes at the end.
    """
    first = [of for of in measured if of.network.seed == of.network.run.task.seeds[0]]
    kept = sorted({of.network.epoch for of in first if not of.network.last})
    some = {kept[int(i)] for i in np.linspace(0, len(kept) - 1, SNAPSHOTS).round()} if kept else ()
    panels: dict[str, dict[str, analysis.LossLine]] = {f"epoch {e}": {} for e in sorted(some)}
    ends: dict[str, analysis.LossLine] = panels.setdefault("last epoch", {})
    planes: dict[str, analysis.LossPlane] = {}
    grid, alphas = np.linspace(-1, 1, 21).tolist(), np.linspace(-1, 1, 41).tolist()
    for of in first:
        panel = ends if of.network.last else panels.get(f"epoch {of.network.epoch}")
        variables = of.network.load()
        if panel is None or not all_finite(variables["params"]):
            continue
        loss = losses(of.network)(of.network.labels(), variables)
        params = jax.tree.map(jnp.asarray, variables["params"])
        x, y = (analysis.random_direction(params, jax.random.key(i)) for i in range(2))
        panel[of.title] = analysis.loss_line(loss, params, x, alphas)
        if of.network.last and len(planes) < PANELS:
            planes[of.title] = analysis.loss_plane(loss, params, x, y, grid, grid)
    if not ends:
        return {}
    looks = _looks(_by_title(first))
    figure = Figure(figsize=(max(7, 1 + 3.2 * len(panels)), 4.4), layout="constrained")
    rows = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    for axes, (text, lines) in zip(rows, panels.items(), strict=True):
        for title, line in lines.items():
            look = {**looks[title]._asdict(), "marker": None}
            axes.plot(line.positions, line.values, label=title, **look)
        axes.set(xlabel="distance α, relative to the weights", title=text)
        tidy(axes)
    rows[0].set_ylabel("loss (nats)")
    legend(figure, rows[-1])
    shown = f"; {len(some)} of {len(kept)} snapshots, evenly chosen" if kept else ""
    title = _title(first, f"a random direction, the first seed{shown}")
    return {"slices.png": png(figure, title), "planes.png": png(analysis.plot_planes(planes))}
