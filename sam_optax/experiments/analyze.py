# ruff: noqa: RUF009 (functions declare the fields)
"""``python -m sam_optax analyze RUN_DIR ...``: the sharpness of the networks of some runs."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.table import Column
from rich.text import Text

from sam_optax import analysis
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.finished import Network, open_run
from sam_optax.experiments.options.declare import POSITIVE, allowed, check, one_of, option
from sam_optax.experiments.reporting import results, words
from sam_optax.experiments.reporting.console import Console, say
from sam_optax.experiments.reporting.output import claimed, write
from sam_optax.experiments.reporting.progress import Progress
from sam_optax.experiments.reporting.table import ruled
from sam_optax.experiments.types import Record

MEASURES = ("sharpness", "adaptive_sharpness", "eigenvalues")
UNITS = {
    "sharpness": "nats, largest rise of the loss found within radius ρ",
    "adaptive_sharpness": "nats, the same within ρ relative to each weight (element-wise, η = 0, "
    "biases not normalized)",
    "lambda_1": "largest eigenvalue of the Hessian",
    "lambda_ratio": "lambda_1 divided by the fifth largest eigenvalue",
    "residual": "largest residual of the first five, relative to lambda_1",
}


@dataclasses.dataclass(frozen=True)
class Analyze:
    """Measures the sharpness of the networks that compare --out has trained.

    Reports sharpness, adaptive sharpness and the largest eigenvalues of the Hessian on the
    training set (at most 10,000 examples) with the labels used in training, of all networks that
    --save-every has kept. sam_optax.experiments.open_run opens them for other measures.
    """

    run_dirs: tuple[Path, ...] = option(
        (), "Directories of --out of finished runs.", metavar="RUN_DIR", positional=True
    )
    out: Path | None = option(
        None, "Directory of analysis.json (default: that of the run).", metavar="DIR"
    )
    measures: tuple[str, ...] = option(MEASURES, "What to measure.", one_of(MEASURES), "MEASURE")
    rho: tuple[float, ...] = option((0.5,), "Radii ρ of sharpness.", POSITIVE)
    adaptive_rho: tuple[float, ...] = option(
        (1.0,), "Radii ρ of adaptive sharpness, relative to the weights.", POSITIVE
    )
    p: tuple[float, ...] = option(
        (2.0,),
        "Norms p of the balls of both, such as 2 or inf.",
        allowed(lambda p: p >= 1, "use at least 1, or inf"),
    )

    def __post_init__(self) -> None:
        """Raises :class:`UserError` for a value out of range, before anything is loaded."""
        check(self)
        if not self.run_dirs:
            raise UserError("RUN_DIR: none is given; give the directories of --out of runs.")
        if len(set(self.run_dirs)) > 1 and self.out is None:
            raise UserError("RUN_DIR: there are several; give --out DIR for the file.")


def run(options: Analyze) -> None:
    """Measures the networks, writes ``analysis.json`` and prints the table."""
    runs = [open_run(directory) for directory in dict.fromkeys(options.run_dirs)]
    for of in runs:
        if of.task.dataset.sha256 != runs[0].task.dataset.sha256:
            raise UserError(f"{of.directory}: was trained on other data than {runs[0].directory}.")
    networks = [network for of in runs for network in of.networks]
    bar = Progress(Console(stderr=True), {"networks": (1.0, len(networks))})
    out = options.out or options.run_dirs[0]
    with claimed(out):
        rows: list[Record] = []
        with bar as progress:
            for i, network in enumerate(networks, 1):
                progress.show(f"measuring network {i} of {len(networks)}")
                rows += _numbers(network, options)
                progress.done("networks")
        if not rows:
            raise UserError("RUN_DIR: all networks have diverged; there is nothing to measure.")
        content = {
            **{"format": "sam_optax.analyze", "format_version": 5, "units": UNITS},
            "runs": {str(opened.directory): opened.results["settings"] for opened in runs},
            "options": {name: words.plain(value) for name, value in vars(options).items()},
            **{"versions": results.versions(), "numbers": rows},
        }
        _print_table(rows)  # first, so that it is there where the disk is full
        write(out, {results.ANALYSIS: results.to_json(content)})
    say(f"\nThe numbers are in {out / results.ANALYSIS}.", stderr=False)


def _numbers(network: Network, options: Analyze) -> list[Record]:
    """A record for each number of a network; none, but a word, if it has diverged."""
    variables = network.load()
    loss, params = network.loss(variables), variables["params"]
    if not np.isfinite(loss(params)):
        where = f"{network.path}: {network.method}, seed {network.seed}"
        say(f"{where}, has diverged, and is not measured.")
        return []
    score = words.Score.of(network.run.results)
    found: dict[tuple[Any, ...], Any] = {}  # by measure, p and radius
    found[score.label, None, None] = score.factor * np.asarray(network.score, float)
    radii = {"sharpness": options.rho, "adaptive_sharpness": options.adaptive_rho}
    for name in (name for name in radii if name in options.measures):
        for p, rho in itertools.product(options.p, radii[name]):
            norm = "inf" if p == np.inf else p  # JSON has no infinity
            found[name, norm, rho] = getattr(analysis, name)(loss, params, rho, p=p).value
    if "eigenvalues" in options.measures:
        k = min(5, sum(leaf.size for leaf in jax.tree.leaves(params)))
        largest = analysis.hessian_eigenvalues(loss, params, k=k, steps=40)
        found["lambda_1", None, None] = largest.values[0]
        if k == 5:
            found["lambda_ratio", None, None] = largest.ratio(5)
        found["residual", None, None] = largest.residuals.max() / abs(largest.values[0])
    who = {name: getattr(network, name) for name in ("method", "seed", "epoch", "last")}
    who = {"run": str(network.run.directory), **who}
    return [
        {**who, "measure": measure, "p": p, "rho": rho, "value": results.number(np.asarray(value))}
        for (measure, p, rho), value in found.items()
    ]


def _print_table(rows: Sequence[Record]) -> None:
    """Prints mean and deviation over the seeds, a line for each measure, method and epoch."""
    several = len({row["run"] for row in rows}) > 1
    names = ["measure", "p", "rho", *["run"] * several, "method", "epoch"]
    seeds: dict[tuple[Any, ...], list[float | None]] = {}
    for row in rows:
        seeds.setdefault(tuple(row[name] for name in names), []).append(row["value"])
    table = ruled(*(Column(words.symbol(name), overflow="fold") for name in names))
    table.add_column("mean ± deviation", justify="right")
    for measure in dict.fromkeys(who[:3] for who in seeds):
        for who in (who for who in seeds if who[:3] == measure):
            found = results.summary(np.array(seeds[who], float))  # NaN for None
            # Networks that have diverged are not measured; λ₅ may be 0, a rise overflow.
            text = words.variation(found, 3, unknown="not finite")
            table.add_row(*(Text(words.plain(cell)) for cell in who), text)
        table.add_section()
    measured = {row["measure"] for row in rows}
    lines = [f"{name}: {unit}" for name, unit in UNITS.items() if name in measured]
    lines.append("on the training set, with the labels trained on; mean ± deviation of the seeds")
    Console().print(table, Text("\n".join(["", *lines]), style="dim"))
