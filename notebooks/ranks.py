"""Which measure of sharpness ranks networks by their generalization gap: ASAM's table 1.

For those who have trained networks on the same data, over every setting that is to count:

    python -m sam_optax compare --methods sgd --weight-decay 1e-4 --out runs/1e-4  (and so on)
    python notebooks/ranks.py runs/* --out ranks.json

It needs pip install "sam_optax[experiments]". The gap is test loss minus training loss, with as
many wrong test labels as training labels. τ is Kendall's, with the middle 95 % of bootstraps over
settings (low, high); then come granulated coefficients ψ of each setting and their mean Ψ.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

from sam_optax import analysis
from sam_optax.experiments import open_run

RADII = {
    ("sharpness", 2.0): (0.01, 0.1, 0.5),
    ("adaptive_sharpness", 2.0): (0.01, 0.1, 1.0),
    ("sharpness", np.inf): (0.0003, 0.003, 0.01),
    ("adaptive_sharpness", np.inf): (0.001, 0.01, 0.1),
}
STEPS, BOOTSTRAPS = 5, 400
OTHER = {"dataset", "m", "preset", "seeds", "seed_offset", "sharpness_rho"}


def settings(networks) -> dict[str, list]:
    """The settings in which the networks differ; other hyperparameters make another method."""
    rows = []
    for network in networks:
        results = network.run.results
        (of,) = (row for row in results["methods"] if row["name"] == network.method)
        known = {
            k: x["value"] for k, x in {**results["settings"], **of["settings"]}.items()
        }
        values = (f"{name} {value}" for name, value in of["hyperparameters"].items())
        row = {"method": " ".join([of["method"], *values]), **known}
        row |= {"groups": known["batch_size"] // known["m"], "seed": network.seed}
        rows.append(row)
    columns = {
        name: [row.get(name) for row in rows] for name in rows[0] if name not in OTHER
    }
    columns = {k: of for k, of in columns.items() if k == "seed" or len(set(of)) > 1}
    if len(columns) == 1 or len(set(zip(*columns.values(), strict=True))) < len(
        networks
    ):
        raise SystemExit(
            "ranks: give networks that differ in more than their seeds, each once."
        )
    return columns


def measure(network) -> dict[tuple, float]:
    """Gap, training loss, and each measure at each radius, of which NaN makes NaN."""
    variables = network.load()
    params, loss = variables["params"], network.loss(variables)
    train, test = float(loss(params)), float(network.loss(variables, "test")(params))
    found = {("gap", None): test - train, ("training loss", None): train}
    for (name, p), rho in ((of, rho) for of, radii in RADII.items() for rho in radii):
        of = getattr(analysis, name)(loss, params, rho, p=p, steps=STEPS, restarts=0)
        found[f"{name.replace('_', ' ')}, p = {p:g}", rho] = float(of.value)
    return found


def interval(values, gap, columns, other=None) -> dict[str, float | None]:
    """95 % bootstrap interval of τ, or of its excess over another measure's, over settings."""
    rows = [*zip(*(of for name, of in columns.items() if name != "seed"), strict=True)]
    members = [
        [i for i, row in enumerate(rows) if row == one] for one in dict.fromkeys(rows)
    ]
    draws = np.random.default_rng(0).integers(
        len(members), size=(BOOTSTRAPS, len(members))
    )
    runs, tau = (
        [np.concatenate([members[i] for i in draw]) for draw in draws],
        analysis.kendall_tau,
    )
    taus = np.array([tau(values[i], gap[i]) for i in runs])
    if other is not None:
        taus -= [tau(other[i], gap[i]) for i in runs]
    return dict(
        zip(("low", "high"), np.quantile(taus, [0.025, 0.975]).tolist(), strict=True)
    )


def table(
    found: dict[tuple, np.ndarray], gap: np.ndarray, columns: dict[str, list]
) -> list[dict]:
    """A row for each measure, and how much better adaptive sharpness is, each at its best ρ."""
    rows, best = [], {}
    for (name, rho), values in found.items():
        ranks = analysis.rank_statistics(values, gap, columns, hold=("seed",))
        best[name] = max(
            best.get(name, (-2.0,)), (ranks.tau, values), key=lambda pair: pair[0]
        )
        row = {
            "measure": name,
            "ρ": rho,
            "τ": ranks.tau,
            **interval(values, gap, columns),
        }
        rows.append({**row, **ranks.psi, "Ψ": ranks.average})
    for name in (name for name in best if name.startswith("sharpness")):
        (tau, values), (other, plain) = best[f"adaptive {name}"], best[name]
        row = {"measure": f"adaptive − {name}", "τ": tau - other}
        rows.append({**row, **interval(values, gap, columns, plain)})
    known = lambda x: None if x != x else x  # JSON has no NaN
    return [{name: known(row.get(name)) for name in rows[0]} for row in rows]


def main(run_dirs, out: Path | None = None) -> None:
    """Prints the rank statistics of runs of compare --out; writes all numbers to a JSON file."""
    runs = [open_run(directory) for directory in run_dirs]
    if len({run.results["dataset"]["sha256"] for run in runs}) > 1:
        raise SystemExit(
            "ranks: the runs were trained on different data; give those on the same."
        )
    networks = [network for run in runs for network in run.networks]
    columns = settings(networks)
    measured = [measure(network) for network in track(networks, "measuring")]
    found = {what: np.array([of[what] for of in measured]) for what in measured[0]}
    fine = np.isfinite([*found.values()]).all(axis=0)  # the others have diverged
    columns = {name: [*np.array(of, object)[fine]] for name, of in columns.items()}
    gap, *measures = (values[fine] for values in found.values())
    rows = table(dict(zip([*found][1:], measures, strict=True)), gap, columns)
    if out:
        known = {**columns, "gap": gap.tolist(), "training loss": measures[0].tolist()}
        out.write_text(json.dumps({"networks": known, "measures": rows}, indent=1))
    names = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    shown = Table(
        *(Column(name, overflow="fold") for name in names),  # no digit is cut off
        box=None,
        caption=f"{sum(fine)} networks; {sum(~fine)} more diverged",
    )
    for row in rows:
        name, *numbers = (row[name] for name in names)
        shown.add_row(name, *("–" if x is None else f"{x:.3g}" for x in numbers))
    Console().print(shown)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "run_dirs", nargs="+", type=Path, help="directories of compare --out"
    )
    parser.add_argument("--out", type=Path, help="JSON file for all numbers")
    main(**vars(parser.parse_args()))
