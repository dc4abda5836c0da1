# ruff: noqa: RUF001 (the papers' Greek letters and mathematical signs, in what is printed)
"""The tables on the terminal: sharpness and eigenvalues, and the stability of the gradient."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sam_optax.experiments.analyze.measures import Measured, Quantity, quantities
from sam_optax.experiments.analyze.options import Analyze
from sam_optax.experiments.finished import Network
from sam_optax.experiments.reporting.table import ruled
from sam_optax.experiments.reporting.words import counted, printable, variation
from sam_optax.experiments.training.measures import MEASURED

_SHOWN = {
    "sharpness": ("sharpness", "nats", 3),
    "adaptive_sharpness": ("adaptive\nsharpness", "nats", 3),
    "lambda_1": ("λ₁", "", 2),
    "lambda_ratio": ("λ₁/λ₅", "", 2),
    "start_loss": ("loss at\nthe start", "nats", 2),
    "cosine": ("cosine", "", 3),
    "perturbed_loss": ("loss after\nthe step", "nats", 2),
}
Groups = Mapping[tuple[str, str, int], Sequence[Measured]]


def print_tables(console: Console, options: Analyze, measured: Sequence[Measured]) -> None:
    """Prints means over the seeds of each method and epoch, and what they are."""
    groups: dict[tuple[str, str, int], list[Measured]] = {}
    for of in measured:
        groups.setdefault((of.run, of.network.name, of.network.epoch), []).append(of)
    left_out = _print(console, groups, headings(options), (None,))
    if "stability" in options.measures:
        console.print()
        first = [q for q in quantities(options) if q.gamma == options.gamma[0]]
        kinds = ("start_loss", "cosine", "perturbed_loss")
        chosen = [q for kind in kinds for q in first if q.measure == kind]
        given = {q: _heading(q, chosen) for q in chosen if q.rho in (None, *options.rho)}
        left_out += _print(console, groups, given, options.gamma)
    if left_out:
        texts = ", ".join(" ".join(text.removesuffix("nats").split()) for text in left_out)
        console.print(Text(f"\nnot shown, for lack of width: {texts}; they are in the files"))
    console.print(Text("\n" + "\n".join(_legend(options, measured, groups))), style="dim")


def headings(options: Analyze) -> dict[Quantity, str]:
    """The numbers of the first table, with their names, units, and radii if there are several."""
    shown = [q for q in quantities(options) if q.measure in _SHOWN and q.gamma is None]
    return {q: _heading(q, shown) for q in shown}


def _heading(what: Quantity, among: Sequence[Quantity]) -> str:
    alike = [q for q in among if q.measure == what.measure]
    name, unit, _ = _SHOWN[what.measure]
    several = {"p": {q.p for q in alike}, "ρ": {q.rho for q in alike}}
    values = {"p": what.p, "ρ": what.rho}
    chosen = [f"{key} = {short(values[key])}" for key, found in several.items() if len(found) > 1]
    return "\n".join(line for line in (name, *chosen, unit) if line)


def short(x: float | None) -> str:
    """A norm or a radius as text."""
    return "∞" if x == math.inf else f"{x:g}"


def _print(
    console: Console,
    groups: Groups,
    headings: Mapping[Quantity, str],
    gammas: Sequence[float | None],
) -> list[str]:
    """Prints the columns that the terminal has room for and returns the headings of the others."""
    shown, left_out = dict(headings), []
    alike = [[q for q in headings if q.measure == of.measure] for of in headings]
    places = {q: same.index(q) for q, same in zip(headings, alike, strict=True)}
    wide = console.options.update(max_width=1000)
    while shown:
        table = _table(groups, shown, gammas)
        if len(shown) == 1 or table.__rich_measure__(console, wide).maximum <= console.width:
            console.print(table)
            break
        # The first norm and radius of each measure stay longest.
        left_out.append(shown.pop(max(reversed(shown), key=places.__getitem__)))
    return left_out[::-1]


def _table(groups: Groups, shown: Mapping[Quantity, str], gammas: Sequence[float | None]) -> Table:
    several = any(run for run, *_ in groups)
    table = ruled(*(["run"] if several else []), "method")
    second = "test accuracy\n%" if gammas == (None,) else "noise\nγ"
    for heading in ("epoch", second, *shown.values()):
        table.add_column(heading, justify="right")
    for (run, name, epoch), members in groups.items():
        for gamma in gammas:
            beside = _accuracy(members[0].network) if gamma is None else f"{gamma:g}"
            cells = [_cell(members, what._replace(gamma=gamma)) for what in shown]
            names = [printable(run), name] if several else [name]
            table.add_row(*map(Text, [*names, str(epoch), beside, *cells]))
    return table


def _accuracy(network: Network) -> str:
    """The test accuracy after the epoch, mean over the seeds."""
    of = next(m for m in network.run.results["methods"] if m["name"] == network.name)
    curves = [seed["curves"]["test_accuracy"] for seed in of["seeds"] if not seed["diverged"]]
    return f"{100 * np.mean([c[network.epoch - 1] for c in curves]):.2f}" if curves else "–"


def _cell(members: Sequence[Measured], what: Quantity) -> str:
    values = [x for of in members if (x := of.values[what]) is not None]
    width = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
    digits = _SHOWN[what.measure][2]
    return variation(float(np.mean(values)), width, digits) if values else "diverged"


def _legend(options: Analyze, measured: Sequence[Measured], groups: Groups) -> list[str]:
    examples = measured[0].network.run.results["dataset"]["train_examples"]
    some = f"{MEASURED:,} examples of " if examples > MEASURED else ""
    counts = {len(members) for members in groups.values()}
    seeds = counted(counts.pop(), "seed") if len(counts) == 1 else "the seeds"
    lines = [
        f"all on {some}the training set, with the labels trained on; mean ± deviation of {seeds}"
    ]
    m = f", mean of groups of {options.m} examples" if options.m else ""
    p = ", ".join(map(short, options.p))
    radii, adaptive = (", ".join(map(short, x)) for x in (options.rho, options.adaptive_rho))
    if p != "2" or "," in radii + adaptive:
        radii, adaptive = (f"ρ, p = {p}, ρ = {x}" for x in (radii, adaptive))
    residuals = [x for of in measured if (x := of.values.get(Quantity("residual"))) is not None]
    worst = f"; residuals at most {max(residuals):.1g} of λ₁" if residuals else ""
    of_measure = {
        "sharpness": f"sharpness: largest rise of the loss found within ‖ε‖ ≤ {radii}{m}",
        "adaptive_sharpness": f"adaptive sharpness: within ‖ε/|w|‖ ≤ {adaptive}, "
        f"element-wise, η = 0, biases not normalized{m}",
        "eigenvalues": f"λ₁, λ₅: eigenvalues of the Hessian{worst}",
        "stability": "cosine: of the gradient at the start, which is w + noise of deviation γ "
        f"({options.noise_scale}), and after a step of length ρ along it; means of "
        f"{counted(options.draws, 'draw')}, with BatchNorm as in training",
    }
    return lines + [text for name, text in of_measure.items() if name in options.measures]
