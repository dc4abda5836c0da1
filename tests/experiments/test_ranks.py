"""``ranks``: which measure of sharpness orders the networks of several runs."""

import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sam_optax import analysis
from sam_optax.__main__ import main
from sam_optax.experiments import finished, ranks
from sam_optax.experiments.data.dataset import load
from sam_optax.experiments.data.labels import corrupt
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.networks.registry import build
from sam_optax.experiments.reporting.results import load_params

pytestmark = pytest.mark.slow


def train(archive, out, *more):
    options = ["--dataset", f"npz:{archive}", "--epochs", "1", "--seeds", "2", "--batch-size", "20"]
    assert main(["compare", *options, "--label-noise", "0.2", *more, "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def run_dirs(archive, tmp_path_factory):
    """SGD and SAM, each with two learning rates."""
    folder = tmp_path_factory.mktemp("runs")
    return [
        train(archive, folder / lr, "--methods", "sgd", "sam", "--lr", lr) for lr in ("0.1", "0.3")
    ]


@pytest.fixture
def few(monkeypatch):
    measures = {
        name: (*row[:2], row[2][:1]) for name, row in ranks.MEASURES.items() if "∞" not in name
    }
    monkeypatch.setattr(ranks, "BOOTSTRAPS", 20)
    monkeypatch.setattr(ranks, "MEASURES", measures)


def test_table(few, run_dirs, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    out = tmp_path / "ranks.json"
    assert main(["ranks", *map(str, run_dirs), "--ascent-steps", "1", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "8 networks (0 diverged) of 2 runs" in printed
    assert "element-wise, η = 0, biases not normalized" in printed
    content = json.loads(out.read_text())
    networks = content["networks"]
    assert networks["method"] == (["sgd"] * 2 + ["sam rho 0.5"] * 2) * 2
    assert networks["lr"] == [0.1] * 4 + [0.3] * 4
    assert networks["seed"] == [0, 1] * 4
    rows = {row.pop("measure"): row for row in content["measures"]}
    difference = rows.pop("adaptive − sharpness, p = 2")
    assert [*rows] == ["training loss", *ranks.MEASURES]
    for row in rows.values():
        low, high = row["interval"]
        assert -1 <= low <= high <= 1
        assert set(row) == {"rho", "tau", "interval", "method", "lr", "average"}
        assert row["average"] == pytest.approx((row["method"] + row["lr"]) / 2, abs=1e-3)
        assert f"{row['tau']:.3f}" in printed
    columns = {name: networks[name] for name in ("method", "lr", "seed")}
    statistics = analysis.rank_statistics(
        networks["training loss"], networks["gap"], columns, hold=("seed",)
    )
    assert rows["training loss"]["tau"] == pytest.approx(statistics.tau)
    assert rows["training loss"]["lr"] == pytest.approx(statistics.psi["lr"])
    adaptive, plain = (rows[f"{name}sharpness, p = 2"]["tau"] for name in ("adaptive ", ""))
    assert difference["tau"] == pytest.approx(adaptive - plain)


def test_the_gap_is_between_samples_of_one_kind_and_sharpness_the_library_s(few, run_dirs, archive):
    opened = finished.open_run(run_dirs[1])
    found = ranks.measure([finished.Network(opened, "sam", 1, 1)], 2)
    dataset, variables = load(f"npz:{archive}"), load_params(run_dirs[1] / "params.npz")["sam"][1]
    model = build("mlp", dataset.shape, 3, jnp.float32)

    def loss(params, part, rng):
        logits = model.apply({"params": params}, part.x, train=False)
        y = corrupt(part.y, 0.2, 3, np.random.default_rng(rng))
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    params = jax.tree.map(jnp.asarray, variables["params"])
    train, test = loss(params, dataset.train, [1, 0]), loss(params, dataset.test, 0)
    np.testing.assert_allclose(found[ranks.LOSS], [train], rtol=1e-5)
    np.testing.assert_allclose(found[ranks.GAP], [test - train], rtol=1e-4)
    sharpness = analysis.sharpness(
        lambda p: loss(p, dataset.train, [1, 0]), params, 0.01, steps=2, restarts=0
    )
    measured = found["sharpness, p = 2", 0.01]
    np.testing.assert_allclose(measured, [sharpness.value], rtol=1e-2)


def test_snapshots_are_networks_of_their_epochs(few, archive, tmp_path, capsys):
    options = ("--methods", "sgd", "--epochs", "3", "--save-every", "1")
    kept = train(archive, tmp_path / "kept", *options)
    once = train(archive, tmp_path / "once", "--methods", "sgd", "asam", "--asam.p", "inf")
    out = tmp_path / "ranks.json"
    paths = map(str, (kept, once))
    assert main(["ranks", *paths, "--ascent-steps", "1", "--out", str(out)]) == 0
    networks = json.loads(out.read_text())["networks"]
    assert networks["epoch"] == [1, 1, 2, 2, 3, 3, 1, 1, 1, 1]
    assert networks["epochs"] == [3] * 6 + [1] * 4
    assert re.fullmatch(r"asam .*p inf.*", networks["method"][-1])
    assert len(set(networks["training loss"])) == 10
    # The same seed and order of examples; the learning rate of the longer run falls more slowly.
    before, after = networks["training loss"][0], networks["training loss"][4]
    assert after < before


def test_networks_that_diverged_are_left_out(few, run_dirs, archive, tmp_path, capsys):
    options = ["--dataset", f"npz:{archive}", "--methods", "sgd", "--lr", "1e30", "--seeds", "1"]
    options += ["--epochs", "2", "--batch-size", "20", "--out", str(tmp_path / "hot")]
    assert main(["compare", *options]) == 2  # the results are there
    capsys.readouterr()
    paths = [str(path) for path in (run_dirs[0], tmp_path / "hot")]
    assert main(["ranks", *paths, "--ascent-steps", "1"]) == 0
    assert "4 networks (1 diverged) of 2 runs" in capsys.readouterr().out
    assert main(["ranks", paths[1]]) == 2


def test_runs_that_cannot_be_ranked(run_dirs, arrays, archive, tmp_path, capsys):
    alone = train(archive, tmp_path / "alone", "--methods", "sgd")
    np.savez(tmp_path / "other.npz", **{**arrays, "y_test": arrays["y_test"][::-1]})
    other = train(tmp_path / "other.npz", tmp_path / "other", "--methods", "sgd", "sam")
    capsys.readouterr()
    for directories, message in {
        (alone,): "RUN_DIR: the networks differ only in their seeds",
        (alone, alone): "RUN_DIR: the networks differ only in their seeds",
        (run_dirs[0], run_dirs[0]): "RUN_DIR: two networks have the same method, settings and seed",
        (run_dirs[0], other): f"{other}: was trained on other data than {run_dirs[0]}",
        (tmp_path,): "holds no results.json and params.npz of a finished run",
        (): "RUN_DIR: none is given",
    }.items():
        assert main(["ranks", *map(str, directories)]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ascent_steps": 0}, "--ascent-steps 0: use an integer of at least 1"),
        ({"out": pathlib.Path("none/ranks.json")}, "--out: none is not a folder"),
    ],
)
def test_options_out_of_range(change, message):
    with pytest.raises(UserError, match=message):
        ranks.Ranks((pathlib.Path("run"),), **change)


def test_interval_of_perfect_agreement():
    values = np.arange(12.0)
    low, high = ranks.interval(values, values, list(range(12)))
    assert (low, high) == (pytest.approx(1), pytest.approx(1))
    low, high = ranks.interval(values, values, list(range(12)), -values)
    assert (low, high) == (pytest.approx(2), pytest.approx(2))
    assert ranks.interval(values[:2], values[:2], [0, 1]) is None  # a draw may be of one network


def test_what_is_not_known_is_a_dash(few, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    found = {(name, 0.1): np.array([1.0, 2.0, 3.0]) for name in ranks.MEASURES}
    columns = {"method": ["sgd", "sam", "asam"], "weight_decay": [2, 1, 1], "seed": [0, 0, 0]}
    rows = ranks.table(found, np.array([1.0, 3.0, 2.0]), columns)
    ranks._print("", rows)
    heading, *printed = capsys.readouterr().out.strip().splitlines()
    # SGD differs from the others in two settings.
    assert heading.split() == ["measure", "ρ", "τ", "95", "%", "method", "Ψ"]
    assert printed[1].split()[-5:] == ["0.1", "0.333", "–", "-1.000", "-1.000"]
