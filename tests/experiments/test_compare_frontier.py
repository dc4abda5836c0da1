"""``compare --frontier``: shares of SAM's gain, intervals, the table and the picture."""

import io
import json

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from sam_optax.experiments import frontier, frontier_plot
from sam_optax.experiments.compare import run
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.family import METHODS
from sam_optax.experiments.options import Compare

ACCURACIES = {
    "sgd": [0.7, 0.8],
    "sam 0.5": [0.9, 0.94],
    "sam 0.7": [0.8, 0.8],
    "part 1": [0.9, 0.92],
    "msam 2": [0.5, 0.6],
}
COSTS = {"sgd": 1.0, "sam 0.5": 2.0, "sam 0.7": 2.0, "part 1": 1.1, "msam 2": 1.01}


def results(accuracies=ACCURACIES, diverged=()):
    return {
        "settings": {
            "label_noise": 0.4,
            "model": "mlp",
            "epochs": 2,
            "batch_size": 10,
            "lr": 0.1,
            "momentum": 0.9,
            "weight_decay": 0.0,
            "frontier": True,
        },
        "dataset": {"name": "toy", "train_examples": 9, "test_examples": 8, "classes": 2},
        "steps_per_epoch": 1,
        "seeds": [0, 1],
        "methods": [
            {
                "name": name,
                "hyperparameters": {"rho": float(name.split()[1])} if " " in name else {},
                "step_cost": COSTS[name],
                "seeds": [
                    {"test_accuracy": None if name in diverged else x, "diverged": name in diverged}
                    for x in values
                ],
            }
            for name, values in accuracies.items()
        ],
    }


def test_shares_are_of_the_best_sams_gain():
    found = {p.hyperparameters.get("rho", 0): p for p in frontier.points(results())}
    assert found[0].share == pytest.approx(0)
    assert found[0.5].share == pytest.approx(1)
    assert found[0.7].share == pytest.approx((0.8 - 0.75) / (0.92 - 0.75))
    assert found[1].share == pytest.approx((0.91 - 0.75) / (0.92 - 0.75))
    assert found[2].share < 0


def test_intervals_are_students():
    point = frontier.points(results())[0]
    low, high = stats.t.interval(0.95, 1, loc=0.75, scale=stats.sem([0.7, 0.8]))
    assert (point.accuracy - point.interval, point.accuracy + point.interval) == pytest.approx(
        (low, high)
    )


def test_one_seed_has_no_interval_and_no_gain_no_share():
    found = frontier.points(results({"sgd": [0.9], "sam 0.5": [0.8], "part 1": [0.8]}))
    assert all(np.isnan(p.interval) and np.isnan(p.share) for p in found)


def test_table_and_picture():
    for of in (results(), results(diverged=("part 1",)), results({"sgd": [0.9], "sam 0.5": [0.8]})):
        console = Console(record=True, width=100, file=io.StringIO())
        frontier.print_frontier(console, of)
        assert "gain kept" in console.export_text()
        assert frontier_plot.frontier(of).startswith(b"\x89PNG")


def test_reaching_the_goal_takes_both():
    console = Console(record=True, width=100, file=io.StringIO())
    values = {"sgd": [0.5], "sam 0.5": [0.9], "part 1": [0.89], "msam 2": [0.6]}
    frontier.print_frontier(console, results(values))
    lines = {line.split()[0]: line for line in console.export_text().splitlines() if line}
    assert "reached" in lines["part"]  # 97.5 % at 1.1
    assert "reached" not in lines["sam"]  # 100 % at 2
    assert "reached" not in lines["msam"]  # 25 % at 1.01


def test_every_radius_is_a_variant_with_the_other_options_as_given():
    def of(name):
        return METHODS[name].variant(**({"fraction": 0.5} if name == "part" else {}))

    chosen = frontier.variants(of)
    assert next(iter(chosen)) == "sgd"
    assert len(chosen) == 1 + sum(map(len, frontier.RADII.values()))
    part = [v.hyperparameters for name, v in chosen.items() if name.startswith("part")]
    assert [h["rho"] for h in part] == list(frontier.RADII["part"])
    assert all(h["fraction"] == 0.5 for h in part)


def test_a_run(archive, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(frontier, "RADII", {"sam": (0.5,), "part": (1.0,), "momentum": (0.3,)})
    options = Compare(
        dataset=f"npz:{archive}",
        frontier=True,
        epochs=2,
        seeds=2,
        batch_size=12,
        out=tmp_path / "out",
    )
    run(options)
    printed = capsys.readouterr().out
    assert "gain kept" in printed
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"frontier.png", "results.json", "results.csv", "params.npz"} <= names
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [m["name"] for m in found["methods"]] == ["sgd", "sam 0.5", "part 1", "momentum 0.3"]


def test_it_chooses_the_methods_itself():
    with pytest.raises(UserError, match="--frontier: chooses the methods itself"):
        run(Compare(frontier=True, methods=("sam",)))
