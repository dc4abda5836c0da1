# ruff: noqa: RUF001, RUF009 (the papers' Greek letters and mathematical signs, in what is printed)
"""``python -m sam_optax ranks DIR ...``: table 1 of the ASAM paper, for any runs."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sam_optax import analysis
from sam_optax.experiments.analyze.measures import Quantity, rise, short
from sam_optax.experiments.analyze.table import Column, print_columns
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.finished import Network, measured, open_runs
from sam_optax.experiments.options.declare import COUNT, check, option, run_dirs
from sam_optax.experiments.reporting import output
from sam_optax.experiments.reporting.console import Console
from sam_optax.experiments.reporting.results import number, versions
from sam_optax.experiments.reporting.words import counted, data_name, named, plain
from sam_optax.experiments.training.task import values
from sam_optax.experiments.types import Record

BOOTSTRAPS = 400
RADII = {
    ("sharpness", 2.0): (0.01, 0.1, 0.5),
    ("adaptive_sharpness", 2.0): (0.01, 0.1, 1.0),
    ("sharpness", np.inf): (0.0003, 0.003, 0.01),
    ("adaptive_sharpness", np.inf): (0.001, 0.01, 0.1),
}
"""Radii of each measure and norm, of which the one with the largest τ counts, as in the paper."""
GAP, LOSS = Quantity("gap"), Quantity("training_loss")

LEGEND = """
gap: test loss minus training loss, with as many wrong test labels as training labels
τ: Kendall's, with the middle 95 % of bootstraps over settings; then the granulated coefficient
of each setting in which networks differ alone, and Ψ, their mean
adaptive sharpness: element-wise, η = 0, biases not normalized (not invariant to every rescaling
of networks that have hidden ones)
adaptive − sharpness: difference of τ, each at its best ρ"""


@dataclasses.dataclass(frozen=True)
class Ranks:
    """Finds which measure of sharpness ranks networks by their generalization gap.

    Measures the networks of several runs on the same data and prints the rank correlation of each
    measure with the gap (test loss minus training loss): Kendall's tau, and the granulated
    coefficient of each setting in which the networks differ.
    """

    run_dirs: tuple[Path, ...] = run_dirs()
    ascent_steps: int = option(5, "Number of ascent steps of the sharpness measures.", COUNT)
    out: Path | None = option(None, "JSON file to write all numbers to.", metavar="FILE")

    def __post_init__(self) -> None:
        check(self)
        output.check_file(self.out)


def run(options: Ranks) -> None:
    """Measures the networks, writes the file and prints a table."""
    runs = open_runs(options.run_dirs)
    networks = [network for opened in runs for network in opened.networks]
    columns = settings(networks)
    of_each = measured(networks, "ranks:", lambda of: measure(of, options.ascent_steps))
    every = {what: np.array([of[what] for of in of_each.values()]) for what in of_each[networks[0]]}
    fine = np.isfinite([*every.values()]).all(axis=0)
    if fine.sum() < 2:
        raise UserError("fewer than two networks have not diverged: there is nothing to rank.")
    columns = {name: [*np.array(column, object)[fine]] for name, column in columns.items()}
    found = {what: of_all[fine] for what, of_all in every.items()}
    gap, loss = found.pop(GAP), found[LOSS]
    rows = table(found, gap, columns)
    if options.out is not None:
        content = {
            "run_dirs": [*map(str, options.run_dirs)],
            "ascent_steps": options.ascent_steps,
            "sha256": runs[0].task.dataset.sha256,
            "versions": versions(),
            "diverged": int((~fine).sum()),
            "networks": {**columns, "training loss": loss.tolist(), "gap": gap.tolist()},
            "measures": rows,
        }
        output.write_json(options.out, content)
    ranges = [f"{x.min():.3g} to {x.max():.3g}" for x in (loss, gap)]
    heading = (
        f"{data_name(runs[0].results)}: {len(gap)} networks ({(~fine).sum()} diverged) of "
        f"{counted(len(runs), 'run')}\ntraining loss {ranges[0]}, gap {ranges[1]} nats\n"
    )
    console = Console(markup=False)
    console.print(heading, soft_wrap=True)
    print_columns(console, shown(rows))
    console.print(LEGEND, style="dim", soft_wrap=True)


def settings(networks: Sequence[Network]) -> dict[str, list[Any]]:
    """The settings in which the networks differ: method, training settings, epoch and seed.

    A method with other hyperparameters counts as another method here. Without snapshots there is no
    epoch: it would be the same as the setting ``epochs``.
    """
    snapshots, rows = not all(network.last for network in networks), []
    for network in networks:
        entry, shared = network.entry, values(network.run.results["settings"])
        hyperparameters = (f"{k} {plain(v)}" for k, v in entry.variant.hyperparameters.items())
        row = {"method": " ".join([entry.method, *hyperparameters])}
        row |= {key: shared[key] for key in ("model", "dtype", "label_noise")}
        row |= {**dataclasses.asdict(entry.recipe), "m": f"batch size / {entry.recipe.groups}"}
        rows.append(row | ({"epoch": network.epoch} if snapshots else {}) | {"seed": network.seed})
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    differing = {k: c for k, c in columns.items() if len(set(c)) > 1 or k == "seed"}
    if len(differing) == 1:
        raise UserError("RUN_DIR: the networks differ only in their seeds; give other runs too.")
    if len(set(zip(*differing.values(), strict=True))) < len(rows):
        raise UserError(
            "RUN_DIR: two networks have the same method, settings and seed; give each run once."
        )
    return differing


def measure(network: Network, steps: int) -> dict[Quantity, float]:
    """Gap, training loss, and each measure at each radius; NaN where the network has diverged."""
    asked = [Quantity(*of, rho) for of, radii in RADII.items() for rho in radii]
    if (variables := network.load()) is None:
        return dict.fromkeys([GAP, LOSS, *asked], np.nan)
    params, loss = variables["params"], network.loss(variables)
    train, test = float(loss(params)), float(network.loss(variables, "test")(params))
    rises = {what: float(rise(loss, params, what, steps=steps, restarts=0)) for what in asked}
    return {GAP: test - train, LOSS: train, **rises}


def table(
    found: Mapping[Quantity, np.ndarray], gap: np.ndarray, columns: Mapping[str, Sequence[Any]]
) -> list[Record]:
    """The rank statistics of each measure, and the advantage of adaptive sharpness."""
    names = [name for name in columns if name != "seed"]
    settings = list(zip(*(columns[name] for name in names), strict=True))
    rows, best = list[Record](), dict[str, np.ndarray]()
    tau = functools.partial(analysis.kendall_tau, gap=gap)
    for what, of_all in found.items():
        name = named(what.measure) + (f", p = {short(what.p)}" if what.p else "")
        best[name] = max(best.get(name, of_all), of_all, key=tau)
        ranks = analysis.rank_statistics(of_all, gap, columns, hold=("seed",))
        row: Record = {"measure": name, "rho": what.rho, "tau": number(ranks.tau)}
        row |= {"interval": interval(of_all, gap, settings)}
        row |= {name: number(ranks.psi[name]) for name in names}
        rows.append(row | {"average": number(ranks.average)})
    for name in (name for name in best if name.startswith("sharpness")):
        plain, adaptive = best[name], best[f"adaptive {name}"]
        row = {"measure": f"adaptive − {name}", "tau": number(tau(adaptive) - tau(plain))}
        row |= {"interval": interval(adaptive, gap, settings, plain)}
        rows.append(dict.fromkeys(rows[0]) | row)
    return rows


def interval(
    of_all: np.ndarray, gap: np.ndarray, groups: Sequence[Any], other: np.ndarray | None = None
) -> list[float] | None:
    """95 % bootstrap interval of τ (or of its excess over another measure's) over settings.

    ``None`` where a draw of too few settings has no τ.
    """
    members = [np.flatnonzero([g == group for g in groups]) for group in dict.fromkeys(groups)]
    draws = np.random.default_rng(0).integers(len(members), size=(BOOTSTRAPS, len(members)))
    runs, tau = [np.concatenate([members[i] for i in draw]) for draw in draws], analysis.kendall_tau
    taus = np.array([tau(of_all[i], gap[i]) for i in runs])
    if other is not None:
        taus -= [tau(other[i], gap[i]) for i in runs]
    return None if np.isnan(taus).any() else np.quantile(taus, [0.025, 0.975]).tolist()


def shown(rows: Sequence[Record]) -> list[Column]:
    """The columns of the printed table; a setting that never differs alone has no coefficient."""

    def column(heading: str, key: str, form: str, place: int = 0) -> Column:
        cells = ["–" if (x := row[key]) is None else form.format(x) for row in rows]
        return Column(heading, cells, place)

    names = [n for n in [*rows[0]][4:-1] if any(row[n] is not None for row in rows)]
    return [
        *(column("measure", "measure", "{}"), column("ρ", "rho", "{:g}")),
        *(column("τ", "tau", "{:.3f}"), column("95 %", "interval", "{0[0]:.2f} to {0[1]:.2f}")),
        *(column(named(name).replace(" ", "\n"), name, "{:.3f}", 1) for name in names),
        column("Ψ", "average", "{:.3f}"),
    ]
