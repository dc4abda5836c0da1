# ruff: noqa: RUF001 (the papers' Greek letters and mathematical signs, in what is printed)
"""``python -m sam_optax ranks DIR ...``: table 1 of the ASAM paper, for any runs."""

import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from rich.console import Console

from sam_optax import analysis
from sam_optax.experiments.data.labels import corrupt
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.finished import Losses, Network, open_runs
from sam_optax.experiments.options.declare import COUNT, check, declared, option
from sam_optax.experiments.reporting import output
from sam_optax.experiments.reporting.progress import Progress
from sam_optax.experiments.reporting.results import number, versions
from sam_optax.experiments.reporting.table import ruled
from sam_optax.experiments.reporting.words import counted, data_name, named, plain
from sam_optax.experiments.training.task import values
from sam_optax.experiments.types import Function, Json, Record

BOOTSTRAPS = 400
MEASURES: dict[str, tuple[Function, float, tuple[float, ...]]] = {
    "sharpness, p = 2": (analysis.sharpness, 2, (0.01, 0.1, 0.5)),
    "adaptive sharpness, p = 2": (analysis.adaptive_sharpness, 2, (0.01, 0.1, 1.0)),
    "sharpness, p = ∞": (analysis.sharpness, np.inf, (0.0003, 0.003, 0.01)),
    "adaptive sharpness, p = ∞": (analysis.adaptive_sharpness, np.inf, (0.001, 0.01, 0.1)),
}
"""Measure, norm p, and radii, of which the one with the largest τ counts, as in the paper."""
GAP, LOSS = ("gap", 0.0), ("training loss", 0.0)

LEGEND = """
gap: test loss minus training loss, with as many wrong test labels as training labels
τ: Kendall's, with the middle 95 % of bootstraps over settings; then the granulated coefficient
of each setting in which networks differ alone, and Ψ, their mean
adaptive sharpness: element-wise, η = 0, biases not normalized (not invariant to every rescaling
of networks that have hidden ones)
adaptive − sharpness: difference of τ, each at its best ρ"""


@dataclasses.dataclass(frozen=True)
@declared
class Ranks:
    """Finds which measure of sharpness ranks networks by their generalization gap.

    Measures the networks of several runs on the same data and prints the rank correlation of each
    measure with the gap (test loss minus training loss): Kendall's tau, and the granulated
    coefficient of each setting in which the networks differ.
    """

    run_dirs: Annotated[
        tuple[Path, ...],
        tyro.conf.Positional,
        tyro.conf.arg(help="Directories of --out of finished runs.", metavar="RUN_DIR ..."),
    ]
    ascent_steps: int = option(5, COUNT)
    """Number of ascent steps of the sharpness measures."""
    out: Path | None = None
    """JSON file to write all numbers to."""

    def __post_init__(self) -> None:
        check(self)
        output.check_file(self.out)


def run(options: Ranks) -> None:
    """Measures the networks, writes the file and prints a table."""
    runs = open_runs(options.run_dirs)
    networks = [network for opened in runs for network in opened.networks]
    columns = settings(networks)
    found = measure(networks, options.ascent_steps)
    fine = np.isfinite([*found.values()]).all(axis=0)
    if fine.sum() < 2:
        raise UserError("fewer than two networks have not diverged: there is nothing to rank.")
    columns = {name: [*np.array(column, object)[fine]] for name, column in columns.items()}
    found = {key: of_all[fine] for key, of_all in found.items()}
    gap = found.pop(GAP)
    rows = table(found, gap, columns)
    if options.out is not None:
        content = {
            "run_dirs": [*map(str, options.run_dirs)],
            "ascent_steps": options.ascent_steps,
            "sha256": runs[0].task.dataset.sha256,
            "versions": versions(),
            "diverged": int((~fine).sum()),
            "networks": {**columns, "training loss": found[LOSS].tolist(), "gap": gap.tolist()},
            "measures": rows,
        }
        output.write_json(options.out, content)
    ranges = [f"{x.min():.3g} to {x.max():.3g}" for x in (found[LOSS], gap)]
    heading = (
        f"{data_name(runs[0].results)}: {len(gap)} networks ({(~fine).sum()} diverged) of "
        f"{counted(len(runs), 'run')}\ntraining loss {ranges[0]}, gap {ranges[1]} nats\n"
    )
    _print(heading, rows)


def settings(networks: Sequence[Network]) -> dict[str, list[Any]]:
    """The settings in which the networks differ: method, training settings, epoch and seed.

    A method with other hyperparameters counts as another method here. Without snapshots there is no
    epoch: it would be the same as the setting ``epochs``.
    """
    snapshots = not all(network.last for network in networks)
    rows = []
    for opened, name, seed, epoch in networks:
        entry, shared = opened.task.entries[name], values(opened.results["settings"])
        hyperparameters = (f"{k} {plain(v)}" for k, v in entry.variant.hyperparameters.items())
        row = {"method": " ".join([entry.method, *hyperparameters])}
        row |= {key: shared[key] for key in ("model", "dtype", "label_noise", "scale")}
        row |= {**dataclasses.asdict(entry.recipe), "m": f"batch size / {entry.recipe.groups}"}
        rows.append(row | ({"epoch": epoch} if snapshots else {}) | {"seed": seed})
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    differing = {k: c for k, c in columns.items() if len(set(c)) > 1 or k == "seed"}
    if len(differing) == 1:
        raise UserError("RUN_DIR: the networks differ only in their seeds; give other runs too.")
    if len(set(zip(*differing.values(), strict=True))) < len(rows):
        raise UserError(
            "RUN_DIR: two networks have the same method, settings and seed; give each run once."
        )
    return differing


def measure(networks: Sequence[Network], steps: int) -> dict[tuple[str, float], np.ndarray]:
    """Gap, training loss and every measure at every radius, (networks,); NaN where diverged."""
    radii = [(name, rho) for name, (*_, radii) in MEASURES.items() for rho in radii]
    found = {key: np.full(len(networks), np.nan) for key in (GAP, LOSS, *radii)}
    losses = Losses()
    work = {"measuring": (1.0, len(networks))}
    with Progress(Console(stderr=True, highlight=False), work, "ranks:") as progress:
        for i, network in enumerate(networks):
            start, task, variables = time.perf_counter(), network.run.task, network.load()
            # Test labels get the same noise as training labels, so that both follow one
            # distribution.
            rng = np.random.default_rng(0)
            noisy = corrupt(task.dataset.test.y, task.label_noise, task.dataset.classes, rng)
            train = losses(network)(network.labels(), variables)
            test = losses(network, "test")(noisy, variables)
            found[LOSS][i] = train(variables["params"])
            found[GAP][i] = test(variables["params"]) - found[LOSS][i]
            for name, rho in radii if np.isfinite(found[LOSS][i]) else ():
                of, p, _ = MEASURES[name]
                rise = of(train, variables["params"], rho, steps=steps, restarts=0, p=p)
                found[name, rho][i] = rise.value
            progress.done("measuring", time.perf_counter() - start)
    return found


def table(
    found: Mapping[tuple[str, float], np.ndarray],
    gap: np.ndarray,
    columns: Mapping[str, Sequence[Any]],
) -> list[Record]:
    """The rank statistics of each measure, and the advantage of adaptive sharpness."""
    names = [name for name in columns if name != "seed"]
    settings = list(zip(*(columns[name] for name in names), strict=True))
    rows: list[Record] = []
    for (name, rho), of_all in found.items():
        ranks = analysis.rank_statistics(of_all, gap, columns, hold=("seed",))
        row: Record = {"measure": name, "rho": rho or None, "tau": number(ranks.tau)}
        row |= {"interval": interval(of_all, gap, settings)}
        row |= {name: number(ranks.psi[name]) for name in names}
        rows.append(row | {"average": number(ranks.average)})
    tau = functools.partial(analysis.kendall_tau, gap=gap)
    best = {m: max((v for (n, _), v in found.items() if n == m), key=tau) for m in MEASURES}
    for name in (name for name in MEASURES if name.startswith("sharpness")):
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
    rng = np.random.default_rng(0)
    members = [np.flatnonzero([g == group for g in groups]) for group in dict.fromkeys(groups)]
    taus = []
    for _ in range(BOOTSTRAPS):
        runs = np.concatenate([members[i] for i in rng.integers(len(members), size=len(members))])
        tau = analysis.kendall_tau(of_all[runs], gap[runs])
        taus.append(tau if other is None else tau - analysis.kendall_tau(other[runs], gap[runs]))
    return None if np.isnan(taus).any() else np.quantile(taus, [0.025, 0.975]).tolist()


def _print(heading: str, rows: Sequence[Json]) -> None:
    shown = ruled()
    shown.add_column("measure")
    # A setting that never differs alone has no coefficient.
    names = [n for n in [*rows[0]][4:-1] if any(row[n] is not None for row in rows)]
    for name in ("ρ", "τ", "95 %", *(named(name).replace(" ", "\n") for name in names), "Ψ"):
        shown.add_column(name, justify="right")
    for row in rows:
        numbers = (row[name] for name in ("tau", *names, "average"))
        tau, *rest = ("–" if x is None else f"{x:.3f}" for x in numbers)
        radius = "–" if row["rho"] is None else f"{row['rho']:g}"
        range_ = "{:.2f} to {:.2f}".format(*row["interval"]) if row["interval"] else "–"
        shown.add_row(row["measure"], radius, tau, range_, *rest)
    console = Console(highlight=False, markup=False)
    console.print(heading, soft_wrap=True)
    console.print(shown)
    console.print(LEGEND, style="dim", soft_wrap=True)
