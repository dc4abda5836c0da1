"""``ranks``: which measure of sharpness orders the networks of several runs."""

import json
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sam_optax import analysis
from sam_optax.__main__ import main
from sam_optax.experiments import ranks
from sam_optax.experiments.data.dataset import load
from sam_optax.experiments.data.labels import corrupt
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.networks.registry import build
from sam_optax.experiments.reporting.snapshots import load_params

pytestmark = pytest.mark.slow


def train(archive, out, *more):
    options = ["--dataset", f"npz:{archive}", "--epochs", "1", "--seeds", "2", "--batch-size", "20"]
    options += ["--label-noise", "0.2", "--weight-decay", "0.0005"]
    return main(["compare", *options, *more, "--out", str(out)])


def rank(*paths, **more):
    return main(["ranks", *map(str, paths), "--ascent-steps", "1", *more.get("options", ())])


@pytest.fixture(scope="module")
def run_dirs(archive, tmp_path_factory):
    """SGD and SAM, each with two learning rates."""
    found = [tmp_path_factory.mktemp("runs") / lr for lr in ("0.1", "0.3")]
    for out in found:
        assert train(archive, out, "--methods", "sgd", "sam", "--lr", out.name) == 0
    return found


@pytest.fixture(autouse=True)
def few(monkeypatch):
    radii = {of: radii[:1] for of, radii in ranks.RADII.items() if of[1] == 2}
    monkeypatch.setattr(ranks, "BOOTSTRAPS", 20)
    monkeypatch.setattr(ranks, "RADII", radii)


def test_table(run_dirs, archive, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    out = tmp_path / "ranks.json"
    assert rank(*run_dirs, options=["--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "8 networks (0 diverged) of 2 runs" in printed
    content = json.loads(out.read_text())
    networks = content["networks"]
    assert networks["method"] == (["sgd"] * 2 + ["sam rho 0.5"] * 2) * 2
    assert networks["lr"] == [0.1] * 4 + [0.3] * 4
    assert networks["seed"] == [0, 1] * 4
    rows = {row.pop("measure"): row for row in content["measures"]}
    difference = rows.pop("adaptive − sharpness, p = 2")
    assert [*rows] == ["training loss", "sharpness, p = 2", "adaptive sharpness, p = 2"]
    for row in rows.values():
        low, high = row["interval"]
        assert -1 <= low <= high <= 1
        assert set(row) == {"rho", "tau", "interval", "method", "lr", "average"}
        assert f"{row['tau']:.3f}" in printed
    columns = {name: networks[name] for name in ("method", "lr", "seed")}
    loss, gap = networks["training loss"], networks["gap"]
    statistics = analysis.rank_statistics(loss, gap, columns, hold=("seed",))
    row = rows["training loss"]
    found = [row[name] for name in ("tau", "lr", "average")]
    assert found == pytest.approx([statistics.tau, statistics.psi["lr"], statistics.average])
    adaptive, plain = (rows[f"{name}sharpness, p = 2"]["tau"] for name in ("adaptive ", ""))
    assert difference["tau"] == pytest.approx(adaptive - plain)
    # The gap is between samples of one kind.
    dataset, variables = load(f"npz:{archive}"), load_params(run_dirs[1] / "params.npz")["sam"][1]
    model = build("mlp", dataset.shape, 3, jnp.float32)

    def mean(part, rng):
        logits = model.apply(variables, part.x, train=False)
        y = corrupt(part.y, 0.2, 3, np.random.default_rng(rng))
        return float(optax.softmax_cross_entropy_with_integer_labels(logits, y).mean())

    train, test = mean(dataset.train, [1, 0]), mean(dataset.test, 0)
    assert (loss[-1], gap[-1]) == pytest.approx((train, test - train), rel=1e-4)


def test_snapshots_are_networks_of_their_epochs(archive, tmp_path):
    kept, once, out = (tmp_path / name for name in ("kept", "once", "ranks.json"))
    assert train(archive, kept, "--methods", "sgd", "--epochs", "3", "--save-every", "1") == 0
    assert train(archive, once, "--methods", "sgd", "asam", "--asam.p", "inf") == 0
    assert rank(kept, once, options=["--out", str(out)]) == 0
    networks = json.loads(out.read_text())["networks"]
    assert networks["epoch"] == [1, 1, 2, 2, 3, 3, 1, 1, 1, 1]
    assert networks["epochs"] == [3] * 6 + [1] * 4
    assert re.fullmatch(r"asam .*p inf.*", networks["method"][-1])
    assert len(set(networks["training loss"])) == 10


def test_runs_that_cannot_be_ranked(run_dirs, arrays, archive, tmp_path, capsys):
    alone, other, hot = (tmp_path / name for name in ("alone", "other", "hot"))
    assert train(archive, alone, "--methods", "sgd") == 0
    assert train(archive, hot, "--methods", "sgd", "--lr", "1e30", "--epochs", "2") == 2
    np.savez(tmp_path / "other.npz", **{**arrays, "y_test": arrays["y_test"][::-1]})
    assert train(tmp_path / "other.npz", other, "--methods", "sgd", "sam") == 0
    copy = (tmp_path / "copy").symlink_to(run_dirs[0]) or tmp_path / "copy"
    capsys.readouterr()
    assert rank(run_dirs[0], hot) == 0
    assert "4 networks (2 diverged) of 2 runs" in capsys.readouterr().out
    for directories, message in {
        (alone,): "RUN_DIR: the networks differ only in their seeds",
        (alone, alone): f"RUN_DIR {alone}: is given twice",
        (run_dirs[0], copy): "RUN_DIR: two networks have the same method, settings and seed",
        (run_dirs[0], other): f"{other}: was trained on other data than {run_dirs[0]}",
        (tmp_path,): "holds no results.json and params.npz of a finished run",
    }.items():
        assert rank(*directories) == 2
        assert message in capsys.readouterr().err


def test_options_out_of_range():
    with pytest.raises(UserError, match="--ascent-steps 0: use an integer of at least 1"):
        ranks.Ranks((Path("run"),), ascent_steps=0)
    with pytest.raises(UserError, match="--out: none is not a folder"):
        ranks.Ranks((Path("run"),), out=Path("none/ranks.json"))


def test_interval_of_perfect_agreement():
    values = np.arange(12.0)
    assert ranks.interval(values, values, range(12)) == pytest.approx([1, 1])
    assert ranks.interval(values, values, range(12), -values) == pytest.approx([2, 2])
    assert ranks.interval(values[:2], values[:2], [0, 1]) is None  # a draw may be of one network


def test_what_is_not_known_is_a_dash():
    found = {ranks.Quantity(*of, 0.1): np.array([1.0, 2.0, 3.0]) for of in ranks.RADII}
    # SGD differs from the others in two settings.
    columns = {"method": ["sgd", "sam", "asam"], "weight_decay": [2, 1, 1], "seed": [0, 0, 0]}
    shown = ranks.shown(ranks.table(found, np.array([1.0, 3.0, 2.0]), columns))
    assert [column.heading for column in shown] == ["measure", "ρ", "τ", "95 %", "method", "Ψ"]
    assert [column.cells[1] for column in shown[1:]] == ["0.1", "0.333", "–", "-1.000", "-1.000"]
