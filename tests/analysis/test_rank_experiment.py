"""The experiment that ranks networks, on a grid small enough for a test."""

import jax
import numpy as np
import pytest

from sam_optax import analysis
from sam_optax.experiments import data, ranks

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


def test_table(small, capsys):
    ranks.main(["--seeds", "2", "--epochs", "1", "--ascent-steps", "1", "--label-noise", "0.2"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("digits: 8 networks (0 diverged), 2 seeds, 20% wrong labels")
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")][1:]
    assert [row[0] for row in rows] == ["training loss", *ranks.MEASURES]
    for row in rows:
        tau, psi = float(row[2]), [float(value) for value in row[4:8]]
        assert -1 <= tau <= 1
        assert np.isfinite([psi[1], psi[3]]).all()
        assert np.isnan([psi[0], psi[2]]).all()  # one value only
        assert float(row[8]) == pytest.approx((psi[1] + psi[3]) / 2, abs=1e-3)
    assert sum(line.startswith("τ of adaptive") for line in lines) == 1
    (stated,) = [line for line in lines if line.startswith("adaptive sharpness:")]
    assert "element-wise, η = 0, biases not normalized" in stated


def test_networks_differ_by_what_is_asked(small):
    dataset = data.load("digits")
    networks, columns = ranks.train_grid(dataset, dataset.y_train, seeds=2, epochs=1)
    assert columns["batch size"] == [64] * 8
    assert columns["learning rate"] == [0.1] * 4 + [0.3] * 4
    assert columns["seed"] == [0, 1] * 4
    kernels = networks["first"]["kernel"]
    assert kernels.shape == (8, 64, ranks.WIDTH)
    assert len(np.unique(np.linalg.norm(kernels, axis=(1, 2)))) == 8
    examples = dataset.x_test.reshape(len(dataset.x_test), -1), dataset.y_test
    loss = analysis.DatasetLoss.from_examples(ranks.example_losses, examples, 500)
    assert np.all(np.asarray(jax.lax.map(loss, networks)) < 2)  # ln 10 without training


def test_interval_of_perfect_agreement():
    values = np.arange(12.0)
    low, high = ranks.interval(values, values, list(range(12)))
    assert (low, high) == (pytest.approx(1), pytest.approx(1))
    low, high = ranks.interval(values, values, list(range(12)), -values)
    assert (low, high) == (pytest.approx(2), pytest.approx(2))
