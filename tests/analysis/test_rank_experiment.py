"""The experiment that ranks networks, on a grid small enough for a test."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sam_optax import analysis
from sam_optax.__main__ import main
from sam_optax.experiments import ranks
from sam_optax.experiments.data.dataset import load
from sam_optax.experiments.errors import UserError

pytestmark = pytest.mark.slow


@pytest.fixture
def small(monkeypatch):
    grid = {
        "batch size": (64,),
        "learning rate": (0.1, 0.3),
        "weight decay": (1e-5,),
        "dropout": (0.0, 0.5),
    }
    monkeypatch.setattr(ranks, "GRID", grid)
    measures = {
        name: (*row[:2], row[2][:1]) for name, row in ranks.MEASURES.items() if "∞" not in name
    }
    monkeypatch.setattr(ranks, "BOOTSTRAPS", 20)
    monkeypatch.setattr(ranks, "MEASURES", measures)


def test_table(small, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    out = tmp_path / "ranks.json"
    options = ["--seeds", "2", "--epochs", "1", "--ascent-steps", "1", "--label-noise", "0.2"]
    assert main(["ranks", *options, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("digits: 8 networks (0 diverged), 2 seeds, 20% wrong labels")
    assert "element-wise, η = 0, biases not normalized" in printed
    content = json.loads(out.read_text())
    assert content["options"]["label_noise"] == 0.2
    rows = {row.pop("measure"): row for row in content["measures"]}
    difference = rows.pop("adaptive − sharpness, p = 2")
    assert [*rows] == ["training loss", *ranks.MEASURES]
    for row in rows.values():
        low, high = row["interval"]
        assert -1 <= low <= high <= 1
        assert -1 <= row["tau"] <= 1
        assert row["batch size"] is None  # one value only
        assert row["weight decay"] is None
        mean = (row["learning rate"] + row["dropout"]) / 2
        assert row["average"] == pytest.approx(mean, abs=1e-3)
        assert f"{row['tau']:.3f}" in printed
    adaptive, plain = (rows[f"{name}sharpness, p = 2"]["tau"] for name in ("adaptive ", ""))
    assert difference["tau"] == pytest.approx(adaptive - plain)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label_noise": 1.0}, r"--label-noise 1: use a number in \[0, 1\)"),
        ({"seeds": 0}, "--seeds 0: use an integer of at least 1"),
        ({"ascent_steps": 0}, "--ascent-steps 0"),
        ({"out": pathlib.Path("none/ranks.json")}, "--out: none is not a folder"),
    ],
)
def test_options_out_of_range(change, message):
    with pytest.raises(UserError, match=message):
        ranks.Ranks(**change)


def test_networks_differ_by_what_is_asked(small):
    dataset = load("digits")
    train, test = (
        (jnp.asarray(part.x.reshape(len(part.y), -1)), jnp.asarray(part.y))
        for part in (dataset.train, dataset.test)
    )
    done = []
    options = ranks.Ranks(seeds=2, epochs=1)
    networks, columns = ranks.train_grid(train, 10, options, lambda *piece: done.append(piece))
    assert len(done) == 1
    assert columns["batch size"] == [64] * 8
    assert columns["learning rate"] == [0.1] * 4 + [0.3] * 4
    assert columns["seed"] == [0, 1] * 4
    kernels = networks["first"]["kernel"]
    assert kernels.shape == (8, 64, ranks.WIDTH)
    assert len(np.unique(np.linalg.norm(kernels, axis=(1, 2)))) == 8
    loss = analysis.DatasetLoss.from_examples(ranks.example_losses, test, 500)
    assert np.all(np.asarray(jax.lax.map(loss, networks)) < 2)  # ln 10 without training


def test_interval_of_perfect_agreement():
    values = np.arange(12.0)
    low, high = ranks.interval(values, values, list(range(12)))
    assert (low, high) == (pytest.approx(1), pytest.approx(1))
    low, high = ranks.interval(values, values, list(range(12)), -values)
    assert (low, high) == (pytest.approx(2), pytest.approx(2))
