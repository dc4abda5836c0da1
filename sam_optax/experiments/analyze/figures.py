# ruff: noqa: RUF001 (the papers' Greek letters and mathematical signs, in what is drawn)
"""The figures of what is measured: over epochs, over radii, stability, and slices of the loss."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from sam_optax import analysis
from sam_optax.experiments.analyze.measures import Analyze, Numbers, Quantity, quantities, short
from sam_optax.experiments.finished import Network, grouped
from sam_optax.experiments.reporting.axes import legend, png, styles, tidy

SNAPSHOTS, PANELS = 3, 6
"""How many snapshots there are slices of besides the last networks, and panels of methods."""
Curves: TypeAlias = dict[str, tuple[Sequence[float], np.ndarray]]
"""For each method positions and values, (seeds, positions)."""
Panel: TypeAlias = tuple[Curves, dict[str, Any]]  # with the labels of the axes


def of_numbers(options: Analyze, found: Mapping[Network, Numbers]) -> dict[str, bytes]:
    """The figures that show the numbers, those that suit them."""
    figures, last = {}, {network: of for network, of in found.items() if network.last}
    about = f"{next(iter(last)).run.about}; "
    seeds = "mean and standard deviation of the seeds"
    shown = [what for what in quantities(options) if what.kind.digits and what.gamma is None]
    if shown and len(last) < len(found):
        first = {what.measure: what for what in reversed(shown)}  # of each the first p and radius
        figure = _panels([_epochs(what, found) for what in reversed(first.values())], found, 2)
        for axes in figure.axes:
            axes.locator_params(axis="x", integer=True)
        figures["epochs.png"] = png(figure, about + seeds)
    if several := [name for name, radii in options.radii.items() if len(radii) > 1]:
        panels = [_radii(options, name, p, last) for name in several for p in options.p]
        figure = _panels(panels, last, len(panels))
        figures["radii.png"] = png(figure, f"{about}after the last epoch; {seeds}")
    if "stability" in options.measures and (curves := _stability(options, last)):
        figure = analysis.plot_stability(curves)
        chance = np.log(next(iter(last)).run.task.dataset.classes)
        for axes in figure.axes[1::2]:
            axes.axhline(chance, color="0.5", linestyle=":")
            axes.annotate("guessing", (1, chance), xycoords=("axes fraction", "data"), ha="right")
        figures["stability.png"] = png(figure, f"{about}noise {options.noise_scale}")
    return figures


def _panels(
    panels: Sequence[Panel], networks: Iterable[Network], columns: int, shared: bool = False
) -> Figure:
    """Draws a curve for each method, the mean over its seeds with a band of their deviation."""
    methods = {network.title: network.entry.method for network in networks}
    looks = dict(zip(methods, styles([*methods.values()]), strict=True))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(1 + 4.2 * columns, 1 + 3.2 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=shared, sharey=shared, squeeze=False).ravel()
    for axes in grid[len(panels) :]:
        axes.remove()
    for axes, (curves, labels) in zip(grid, panels, strict=False):
        for title, (x, values) in curves.items():
            finite = np.ma.masked_invalid(values)
            mean, deviation, every = finite.mean(0), finite.std(0), max(1, len(x) // 8)
            look = {"markersize": 4, "markevery": every, **looks[title]._asdict()}
            axes.plot(x, mean, label=title, **look)
            band = x, mean - deviation, mean + deviation
            axes.fill_between(*band, color=looks[title].color, alpha=0.15)
        axes.set(**labels)
        axes.set_xticks([], minor=True)
        tidy(axes)
        if shared:
            axes.label_outer()
    legend(figure, grid[len(panels) - 1])
    return figure


def _epochs(what: Quantity, found: Mapping[Network, Numbers]) -> Panel:
    """A number over the epochs of the snapshots."""
    curves: Curves = {}
    for title, of in grouped(found, "title").items():
        epochs = [*dict.fromkeys(network.epoch for network in of)]
        values = np.array([found[network][what] for network in of], float)
        curves[title] = epochs, values.reshape(len(epochs), -1).T
    label = re.sub(r"\n(?=[pρ] =)", ", ", what.heading).replace("\nnats", " (nats)")
    return curves, {"xlabel": "epoch", "ylabel": label.replace("\n", " ")}


def _radii(options: Analyze, measure: str, p: float, last: Mapping[Network, Numbers]) -> Panel:
    """Sharpness over the radius."""
    rhos, curves = sorted(options.radii[measure]), Curves()
    for title, of in grouped(last, "title").items():
        values = [[last[network][Quantity(measure, p, rho)] for rho in rhos] for network in of]
        curves[title] = rhos, np.array(values, float)
    unit = "relative to" if measure == "adaptive_sharpness" else "in units of"
    return curves, {
        "xlabel": f"radius ρ, {unit} the weights",
        "ylabel": f"{measure.replace('_', ' ')} (nats), p = {short(p)}",
        **{"xscale": "log", "yscale": "log"},
        **{"xticks": rhos, "xticklabels": [*map(short, rhos)]},
    }


def _stability(
    options: Analyze, last: Mapping[Network, Numbers]
) -> dict[str, analysis.GradientStability]:
    """Figures 1 and 2 of the R-SAM paper, rows for the first methods; bands are the seeds."""
    rhos, curves = options.stability_radii, dict[str, analysis.GradientStability]()
    for title, of in grouped(last, "title").items():
        fine = [last[network] for network in of if None not in last[network].values()]
        rows = [[x for what, x in seed.items() if what.gamma is not None] for seed in fine]
        if fine and len(curves) < PANELS:
            # In the order of quantities(): of each γ the loss at the start, then both curves.
            values = np.array(rows, np.float32).reshape(len(fine), len(options.gamma), -1)
            parts = np.split(values.swapaxes(0, 1), [1, 1 + len(rhos)], axis=-1)
            start, cosine, loss = map(jnp.asarray, parts)
            grid = jnp.array(rhos), jnp.array(options.gamma)
            curves[title] = analysis.GradientStability(*grid, cosine, loss, start[..., 0])
    return curves


def slices(networks: Iterable[Network]) -> dict[str, bytes]:
    """Slices of the loss of the first seed's networks, in the same random directions.

    Lines of all methods, at the end and at a few epochs before, and planes at the end.
    """
    first = [network for network in networks if network.seed == network.run.task.seeds[0]]
    kept = sorted({network.epoch for network in first if not network.last})
    some = {kept[int(i)] for i in np.linspace(0, len(kept) - 1, SNAPSHOTS).round()} if kept else ()
    texts, labels = (
        [*(f"epoch {epoch}" for epoch in sorted(some)), "last epoch"],
        {"xlabel": "distance α, relative to the weights", "ylabel": "loss (nats)"},
    )
    panels: dict[str, Panel] = {text: ({}, {**labels, "title": text}) for text in texts}
    planes: dict[str, analysis.LossPlane] = {}
    grid, alphas = np.linspace(-1, 1, 21).tolist(), np.linspace(-1, 1, 41).tolist()
    for network in first:
        text = "last epoch" if network.last else f"epoch {network.epoch}"
        if text not in panels or (variables := network.load()) is None:
            continue
        loss, params = network.loss(variables), variables["params"]
        x, y = (analysis.random_direction(params, jax.random.key(i)) for i in range(2))
        line = analysis.loss_line(loss, params, x, alphas)
        panels[text][0][network.title] = alphas, np.array([line.values])
        if network.last and len(planes) < PANELS:
            planes[network.title] = analysis.loss_plane(loss, params, x, y, grid, grid)
    if not planes:
        return {}
    shown = f"; {len(some)} of {len(kept)} snapshots, evenly chosen" if kept else ""
    figure = _panels([*panels.values()], first, len(panels), True)
    title = f"{first[0].run.about}; a random direction, the first seed{shown}"
    return {"slices.png": png(figure, title), "planes.png": png(analysis.plot_planes(planes))}
