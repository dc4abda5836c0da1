# ruff: noqa: RUF009 (functions declare the fields)
"""``python -m sam_optax analyze RUN_DIR ...``: the sharpness of the networks of some runs."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.text import Text

from sam_optax import analysis
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.finished import Network, open_run
from sam_optax.experiments.options import declare
from sam_optax.experiments.options.declare import option
from sam_optax.experiments.reporting import results, words
from sam_optax.experiments.reporting.console import Console, say
from sam_optax.experiments.reporting.output import OutputDirectory
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
    measures: tuple[str, ...] = option(
        MEASURES, "What to measure.", declare.one_of(MEASURES), "MEASURE"
    )
    rho: tuple[float, ...] = option((0.5,), "Radii ρ of sharpness.", declare.POSITIVE)
    adaptive_rho: tuple[float, ...] = option(
        (1.0,), "Radii ρ of adaptive sharpness, relative to the weights.", declare.POSITIVE
    )
    p: tuple[float, ...] = option(
        (2.0,),
        "Norms p of the balls of both, such as 2 or inf.",
        declare.allowed(lambda p: p >= 1, "use at least 1, or inf"),
    )

    def __post_init__(self) -> None:
        """Raises :class:`UserError` for a value out of range, before anything is loaded."""
        declare.check(self)
        if not self.run_dirs:
            raise UserError("RUN_DIR: none is given; give the directories of --out of runs.")
        if len(set(self.run_dirs)) > 1 and self.out is None:
            raise UserError("RUN_DIR: there are several; give --out DIR for the file.")


def run(options: Analyze) -> None:
    """Measures the networks, writes ``analysis.json`` and prints the table."""
    runs = [open_run(directory) for directory in dict.fromkeys(options.run_dirs)]
    for opened in runs:
        if opened.task.dataset.sha256 != runs[0].task.dataset.sha256:
            raise UserError(
                f"{opened.directory}: was trained on other data than {runs[0].directory}."
            )
    with OutputDirectory(options.out or options.run_dirs[0]) as out:
        rows = _measured([network for opened in runs for network in opened.networks], options)
        content = {
            **{"format": "sam_optax.analyze", "format_version": 5, "units": UNITS},
            "runs": {str(opened.directory): opened.results["settings"] for opened in runs},
            "options": {name: words.plain(value) for name, value in vars(options).items()},
            **{"versions": results.versions(), "numbers": rows},
        }
        _print_table(rows)  # first, so that it is there where the disk is full
        out.write({results.ANALYSIS: results.to_json(content)})
    say(f"\nThe numbers are in {out.path / results.ANALYSIS}.", stderr=False)


def _measured(networks: Sequence[Network], options: Analyze) -> list[Record]:
    """A record for each number of the networks that have not diverged."""
    rows: list[Record] = []
    work = {"networks": (1.0, len(networks))}
    with Progress(Console(stderr=True), work, "measuring") as progress:
        for of in networks:
            who = {"run": str(of.run.directory), "method": of.method, "seed": of.seed}
            who |= {"epoch": of.epoch, "last": of.last}
            if found := [{**who, **number} for number in _numbers(of, options)]:
                rows += found
            else:
                say(f"{of.path}: {of.method}, seed {of.seed}, has diverged, and is not measured.")
            progress.done("networks")
    if not rows:
        raise UserError("RUN_DIR: all networks have diverged; there is nothing to measure.")
    return rows


def _numbers(network: Network, options: Analyze) -> Iterator[Record]:
    """The numbers of a network, none if it has diverged."""
    variables = network.load()
    loss, params = network.loss(variables), variables["params"]
    if not np.isfinite(loss(params)):
        return
    score = words.Score.of(network.run.results)
    yield _record(score.label, score.factor * np.asarray(network.score, float))
    radii = {"sharpness": options.rho, "adaptive_sharpness": options.adaptive_rho}
    for name in (name for name in radii if name in options.measures):
        for p, rho in itertools.product(*map(dict.fromkeys, (options.p, radii[name]))):
            yield _record(name, getattr(analysis, name)(loss, params, rho, p=p).value, p, rho)
    if "eigenvalues" in options.measures:
        k = min(5, sum(leaf.size for leaf in jax.tree.leaves(params)))
        largest = analysis.hessian_eigenvalues(loss, params, k=k, steps=40)
        yield _record("lambda_1", largest.values[0])
        if k == 5:
            yield _record("lambda_ratio", largest.ratio(5))
        yield _record("residual", largest.residuals.max() / abs(largest.values[0]))


def _record(measure: str, value: Any, p: Any = None, rho: float | None = None) -> Record:
    p = "inf" if p == np.inf else p  # JSON has no infinity
    return {"measure": measure, "p": p, "rho": rho, "value": results.number(np.asarray(value))}


def _print_table(rows: Sequence[Record]) -> None:
    """Prints mean and deviation over the seeds, a line for each measure, method and epoch."""
    runs = ["run"] if len({row["run"] for row in rows}) > 1 else []
    what, who = ("measure", "p", "rho"), (*runs, "method", "epoch")
    seeds: dict[tuple[Any, ...], dict[tuple[Any, ...], list[float | None]]] = {}
    for row in rows:
        of_what = seeds.setdefault(tuple(row[name] for name in what), {})
        of_what.setdefault(tuple(row[name] for name in who), []).append(row["value"])
    table = ruled("measure", "p", "ρ", *who, "mean ± deviation")
    for measure, networks in seeds.items():
        for network, numbers in networks.items():
            values = np.array(numbers, np.float64)  # None becomes NaN
            width = values.std(ddof=1) if len(values) > 1 else np.nan
            mean = words.variation(values.mean(), width, 3)
            cells = (Text(words.plain(cell)) for cell in (*measure, *network))
            # Networks that have diverged are not measured; λ₅ may be 0, a rise overflow.
            table.add_row(*cells, mean if np.isfinite(values).all() else "not finite")
        table.add_section()
    for column in table.columns:
        column.overflow = "fold"  # the ends of long paths tell runs apart
    table.columns[-1].justify = "right"
    measured = {row["measure"] for row in rows}
    lines = [f"{name}: {unit}" for name, unit in UNITS.items() if name in measured]
    lines.append("on the training set, with the labels trained on; mean ± deviation of the seeds")
    Console().print(table, Text("\n".join(["", *lines]), style="dim"))
