# ruff: noqa: RUF001 (the papers' Greek letters and mathematical signs, in what is printed)
"""The tables on the terminal: sharpness and eigenvalues, and the stability of the gradient."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from rich.text import Text

from sam_optax.experiments.analyze.measures import Analyze, Numbers, Quantity, quantities, short
from sam_optax.experiments.finished import Network, grouped
from sam_optax.experiments.reporting import words
from sam_optax.experiments.reporting.console import Console
from sam_optax.experiments.reporting.table import ruled
from sam_optax.experiments.reporting.words import counted, printable, variation
from sam_optax.experiments.training.measures import MEASURED


class Column(NamedTuple):
    """A column; of those above ``place`` 0, those with the largest are left out first."""

    heading: str
    cells: Sequence[str]
    place: int = 0


def print_columns(console: Console, columns: Sequence[Column]) -> None:
    """Prints the columns that the terminal has room for, and names the others."""
    shown, wide = [*columns], console.options.update(max_width=1000)
    while True:
        table = ruled()
        for heading, _, place in shown:
            left = heading in ("run", "method", "measure") and not place
            table.add_column(Text(heading), justify="left" if left else "right")
        for row in zip(*(column.cells for column in shown), strict=True):
            table.add_row(*map(Text, row))
        place = max(column.place for column in shown)
        if not place or console.measure(table, options=wide).maximum <= console.width:
            break
        shown.pop(max(i for i, column in enumerate(shown) if column.place == place))
    console.print(table)
    if left_out := [column.heading for column in columns if column not in shown]:
        text = ", ".join(" ".join(heading.removesuffix("nats").split()) for heading in left_out)
        console.print(Text(f"\nnot shown, for lack of width: {text}; see the files of --out"))


def print_tables(console: Console, options: Analyze, found: Mapping[Network, Numbers]) -> None:
    """Prints means over the seeds of each method and epoch, and what they are."""
    groups = grouped(found, "run.label", "name", "epoch")
    for gammas in ((None,), options.gamma):
        shown = [q for q in quantities(options) if q.gamma == gammas[0] and q.kind.digits]
        if gammas != (None,):
            shown = [q for q in shown if q.rho in (None, *options.rho)]
        if not shown:
            continue
        rows = [(*key, of, gamma) for key, of in groups.items() for gamma in gammas]
        runs, names, epochs, members, noise = zip(*rows, strict=True)
        columns = [Column("run", [*map(printable, runs)])] if any(runs) else []
        columns += [Column("method", names), Column("epoch", [*map(str, epochs)])]
        if gammas == (None,):
            score = words.Score.of(members[0][0].run.results)
            heading = f"test {score.name}\n{score.unit}".rstrip()
            columns.append(Column(heading, [_score(of[0]) for of in members]))
        else:
            columns.append(Column("noise\nγ", [*map(short, noise)]))
        for i, what in enumerate(shown):
            cells = [
                _mean([found[n][what._replace(gamma=row[-1])] for n in row[-2]], what.kind.digits)
                for row in rows
            ]
            place = [q.measure for q in shown[: i + 1]].count(what.measure)
            columns.append(Column(what.heading, cells, place))
        print_columns(console, columns)
        console.print()
    lines = _legend(options, found, {len(members) for members in groups.values()})
    console.print(Text("\n".join(lines)), style="dim")


def _score(network: Network) -> str:
    """The test score after the epoch, mean over the seeds."""
    curves, score = network.run.scores[network.name], words.Score.of(network.run.results)
    if not len(curves):
        return "–"
    return score.text({"mean": curves[:, network.epoch - 1].mean(), "std": None})


def _mean(values: Sequence[float | None], digits: int) -> str:
    known = [x for x in values if x is not None]
    width = float(np.std(known, ddof=1)) if len(known) > 1 else math.nan
    return variation(float(np.mean(known)), width, digits) if known else "diverged"


def _legend(options: Analyze, found: Mapping[Network, Numbers], counts: set[int]) -> list[str]:
    examples = len(next(iter(found)).run.task.dataset.train.y)
    some = f"{MEASURED:,} examples of " if examples > MEASURED else ""
    seeds = counted(counts.pop(), "seed") if len(counts) == 1 else "the seeds"
    m = f", mean of groups of {options.m} examples" if options.m else ""
    p = ", ".join(map(short, options.p))
    radii, adaptive = (", ".join(map(short, x)) for x in (options.rho, options.adaptive_rho))
    if p != "2" or "," in radii + adaptive:
        radii, adaptive = (f"ρ, p = {p}, ρ = {x}" for x in (radii, adaptive))
    residuals = [x for of in found.values() if (x := of.get(Quantity("residual"))) is not None]
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
    return [
        f"all on {some}the training set, with the labels trained on; mean ± deviation of {seeds}",
        *(text for name, text in of_measure.items() if name in options.measures),
    ]
