"""``notebooks/ranks.py``: which measure of sharpness orders the networks of several runs."""

import json
from pathlib import Path

import numpy as np
import pytest

from sam_optax import analysis
from sam_optax.__main__ import main as command
from sam_optax.experiments import named

pytestmark = pytest.mark.slow
main = named.find(f"{Path(__file__).parents[2] / 'notebooks' / 'ranks.py'}:main")
script = main.__globals__


def train(archive, out, *more):
    options = ["--dataset", f"npz:{archive}", "--epochs", "1", "--seeds", "2", "--batch-size", "20"]
    options += ["--label-noise", "0.2", "--weight-decay", "0.0005", "--methods", "sgd"]
    command(["compare", *options, *more, "--out", str(out)])
    return out


def test_table_of_runs(archive, arrays, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(script, "RADII", {of: (0.1,) for of in script["RADII"] if of[1] == 2})
    monkeypatch.setitem(script, "BOOTSTRAPS", 20)
    monkeypatch.setitem(script, "STEPS", 1)
    both = "--methods", "sgd", "sam", "--lr"
    cold, warm = (train(archive, tmp_path / lr, *both, lr) for lr in ("0.1", "0.3"))
    long = train(archive, tmp_path / "long", "--epochs", "2", "--lr", "0.2")
    hot = train(archive, tmp_path / "hot", "--epochs", "2", "--lr", "1e30")
    monkeypatch.setenv("COLUMNS", "60")
    main((cold, warm, long, hot), tmp_path / "ranks.json")
    printed = capsys.readouterr().out
    assert "10 networks; 2 more diverged" in printed
    assert "…" not in printed  # no number is cut off
    content = json.loads((tmp_path / "ranks.json").read_text())
    networks, rows = content["networks"], {row["measure"]: row for row in content["measures"]}
    assert networks["method"] == (["sgd"] * 2 + ["sam rho 0.5"] * 2) * 2 + ["sgd"] * 2
    assert networks["lr"] == [0.1] * 4 + [0.3] * 4 + [0.2] * 2
    assert networks["epochs"] == [1] * 8 + [2] * 2
    names = ["training loss", "sharpness, p = 2", "adaptive sharpness, p = 2"]
    assert [*rows] == [*names, "adaptive − sharpness, p = 2"]
    columns = {name: networks[name] for name in ("method", "epochs", "lr", "seed")}
    loss, gap, row = networks["training loss"], networks["gap"], rows["training loss"]
    ranks = analysis.rank_statistics(loss, gap, columns, hold=("seed",))
    expected = [ranks.tau, ranks.psi["lr"], ranks.average]
    assert [row[name] for name in ("τ", "lr", "Ψ")] == pytest.approx(expected)
    assert row["epochs"] is None  # it never differs alone
    difference = rows[names[2]]["τ"] - rows[names[1]]["τ"]
    assert rows["adaptive − sharpness, p = 2"]["τ"] == pytest.approx(difference)
    np.savez(tmp_path / "other.npz", **{**arrays, "y_test": arrays["y_test"][::-1]})
    other = train(tmp_path / "other.npz", tmp_path / "other", "--seeds", "1")
    with pytest.raises(SystemExit, match="the runs were trained on different data"):
        main((cold, other))
    with pytest.raises(SystemExit, match="differ in more than their seeds, each once"):
        main((cold, cold))


def test_interval_of_perfect_agreement():
    values, columns = np.arange(12.0), {"lr": [*range(12)], "seed": [0] * 12}
    found = script["interval"](values, values, columns)
    assert found == pytest.approx({"low": 1, "high": 1})
    difference = script["interval"](values, values, columns, -values)
    assert [*difference.values()] == pytest.approx([2, 2])
