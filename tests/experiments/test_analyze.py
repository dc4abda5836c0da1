"""``analyze``: measures of a run's networks, against the library's own and dense ones."""

import contextlib
import csv
import io
import json
import math
import os
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import sam_optax
from sam_optax import analysis
from sam_optax.__main__ import main
from sam_optax.experiments.analyze import command, figures, measures
from sam_optax.experiments.analyze.options import Analyze
from sam_optax.experiments.data.dataset import load
from sam_optax.experiments.data.labels import corrupt
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.finished import Losses, open_run
from sam_optax.experiments.networks.registry import build
from sam_optax.experiments.reporting.results import load_params

pytestmark = pytest.mark.slow

STEPS = ["--steps", "3", "--lanczos-steps", "8"]


@pytest.fixture(scope="module")
def run_dir(archive, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "out"
    arguments = ["--dataset", f"npz:{archive}", "--methods", "sgd", "sam", "--epochs", "2"]
    arguments += ["--seeds", "2", "--batch-size", "12", "--label-noise", "0.25"]
    assert main(["compare", *arguments, "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def analyzed(run_dir):
    assert main(["analyze", str(run_dir), *STEPS]) == 0
    return json.loads((run_dir / "analysis.json").read_text())


def loss_and_params(archive, run_dir, name, seed):
    dataset = load(f"npz:{archive}")
    model = build("mlp", dataset.shape, dataset.classes, jnp.float32)
    y = corrupt(dataset.train.y, 0.25, 3, np.random.default_rng([seed, 0]))
    variables = load_params(run_dir / "params.npz")[name][seed]

    def loss(params):
        logits = model.apply({"params": params}, dataset.train.x, train=False)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    return loss, jax.tree.map(jnp.asarray, variables["params"])


def of(analyzed, name, seed, epoch=2):
    """The numbers of a network with one radius each, by measure."""
    chosen = {"method": name, "seed": seed, "epoch": epoch}
    (found,) = (n["measured"] for n in analyzed["networks"] if chosen.items() <= n.items())
    return {number["measure"]: number["value"] for number in found}


def test_files_and_table(run_dir, analyzed, capsys):
    assert main(["analyze", str(run_dir), *STEPS, "--seeds", "1"]) == 0
    printed = capsys.readouterr().out
    assert "λ₁/λ₅" in printed
    assert "of 1 seed" in printed
    assert "element-wise, η = 0, biases not normalized" in " ".join(printed.split())
    assert analyzed["adaptive_sharpness"] == {
        "normalization": "elementwise",
        "eta": 0.0,
        "biases": "not normalized",
    }
    for name in ("slices.png", "planes.png"):
        assert (run_dir / name).read_bytes().startswith(b"\x89PNG")
    with (run_dir / "analysis.csv").open() as file:
        lines = [*csv.DictReader(file)]
    assert [*lines[0]] == [
        *("run", "method", "seed", "epoch", "measure", "p", "rho", "gamma", "value")
    ]
    assert len(lines) == 2 * 5
    assert [line["value"] for line in lines[5:]] == [*map(str, of(analyzed, "sam", 0).values())]
    for name in ("epochs.png", "radii.png", "stability.png"):
        assert not (run_dir / name).exists()
    assert [n["method"] for n in analyzed["networks"]] == ["sgd", "sgd", "sam", "sam"]
    assert (run_dir / "results.json").is_file()


@pytest.fixture(scope="module")
def kept(archive, tmp_path_factory):
    """A run with snapshots, from one seed."""
    out = tmp_path_factory.mktemp("kept") / "out"
    arguments = ["--dataset", f"npz:{archive}", "--methods", "sgd", "sam", "--epochs", "5"]
    arguments += ["--seeds", "1", "--batch-size", "12", "--save-every", "2", "--out", str(out)]
    assert main(["compare", *arguments]) == 0
    return out


def test_snapshots_are_measured_over_epochs(kept, capsys):
    assert main(["analyze", str(kept), *STEPS]) == 0
    printed = capsys.readouterr().out
    assert (kept / "epochs.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((kept / "analysis.json").read_text())
    results = json.loads((kept / "results.json").read_text())
    assert results["settings"]["save_every"]["value"] == 2
    for method in results["methods"]:
        name, accuracies = method["name"], method["seeds"][0]["curves"]["test_accuracy"]
        sharpness = {epoch: of(found, name, 0, epoch)["sharpness"] for epoch in (2, 4, 5)}
        assert len({*sharpness.values()}) == 3
        for epoch, value in sharpness.items():
            shown = f"{100 * accuracies[epoch - 1]:.2f}"
            assert re.search(rf"{name} +{epoch} +{shown} +{value:.3f}", printed)
    assert len(found["networks"]) == 6


def test_a_snapshot_is_the_network_that_the_results_saw(kept, archive):
    """Its loss on the labels trained on is that of the curve at its epoch."""
    results = json.loads((kept / "results.json").read_text())
    curve = results["methods"][1]["seeds"][0]["curves"]["train_loss"]
    dataset = load(f"npz:{archive}")
    model = build("mlp", dataset.shape, dataset.classes, jnp.float32)
    y = corrupt(dataset.train.y, 0.4, 3, np.random.default_rng([0, 0]))
    for name, epoch in {"params_epoch_2": 2, "params_epoch_4": 4, "params": 5}.items():
        variables = load_params(kept / f"{name}.npz")["sam"][0]
        logits = model.apply(variables, dataset.train.x, train=False)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        assert float(loss) == pytest.approx(curve[epoch - 1], rel=1e-5)
    assert len(set(curve)) == 5
    assert len([*kept.glob("params*.npz")]) == 3


def test_a_missing_snapshot(kept, tmp_path, capsys):
    shutil.copytree(kept, tmp_path / "run")
    (tmp_path / "run" / "params_epoch_4.npz").unlink()
    assert main(["analyze", str(tmp_path / "run"), *STEPS]) == 2
    assert "params_epoch_4.npz: is damaged ([Errno 2] No such file" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"{}", b"PK\3\4"])
def test_damaged_params(content, run_dir, tmp_path, capsys):
    shutil.copytree(run_dir, tmp_path / "run")
    (tmp_path / "run" / "params.npz").write_bytes(content)
    assert main(["analyze", str(tmp_path / "run"), *STEPS]) == 2
    assert "params.npz: is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "seed"), [("sgd", 0), ("sam", 1)])
def test_sharpness_is_at_least_one_step_of_sam(archive, run_dir, analyzed, name, seed):
    loss, params = loss_and_params(archive, run_dir, name, seed)
    sam = sam_optax.sam(0.5)
    point, _ = sam.perturb_fn(params, jax.grad(loss)(params), sam.init(params))
    rise = float(loss(point) - loss(params))
    assert rise > 0
    found = of(analyzed, name, seed)["sharpness"]
    assert rise * (1 - 1e-3) <= found < 3 * rise


def test_the_largest_eigenvalue_is_that_of_power_iteration(archive, run_dir, analyzed):
    loss, params = loss_and_params(archive, run_dir, "sgd", 0)
    flat, unravel = ravel_pytree(params)
    grad = jax.grad(lambda v: loss(unravel(v)))
    product = jax.jit(lambda v: jax.jvp(grad, (flat,), (v,))[1])
    v = jax.random.normal(jax.random.key(5), flat.shape)
    for _ in range(200):
        v = product(v) + 0.1 * v  # shifted, so that the algebraically largest dominates
        v = v / jnp.linalg.norm(v)
    expected = float(v @ product(v))
    assert of(analyzed, "sgd", 0)["lambda_1"] == pytest.approx(expected, rel=2e-2)


@pytest.fixture(scope="module")
def studied(run_dir, kept, tmp_path_factory):
    """Grids, groups and stability of two runs together, of one seed, on a narrow terminal."""
    out, printed = tmp_path_factory.mktemp("studied") / "out", io.StringIO()
    arguments = ["analyze", str(run_dir), str(kept), "--out", str(out), "--seeds", "1"]
    arguments += ["--measures", "sharpness", "adaptive_sharpness", "stability", "slices"]
    arguments += ["--rho", "0.1", "0.4", "--p", "2", "inf", "--m", "16", "--steps", "3"]
    arguments += ["--gamma", "0", "0.3", "--noise-scale", "relative", "--draws", "2"]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setenv("COLUMNS", "80")
        assert main(arguments) == 0
    return out, json.loads((out / "analysis.json").read_text()), printed.getvalue()


def numbers(studied, run_dir, name):
    chosen = {"run": str(run_dir), "method": name}
    (found,) = (n["measured"] for n in studied[1]["networks"] if chosen.items() <= n.items())
    return {tuple(row.values())[:4]: row["value"] for row in found}


def test_grids_of_m_sharpness_are_the_library_s(studied, run_dir, archive):
    _, params = loss_and_params(archive, run_dir, "sam", 0)
    dataset = load(f"npz:{archive}")
    y = corrupt(dataset.train.y, 0.25, 3, np.random.default_rng([0, 0]))
    model = build("mlp", dataset.shape, dataset.classes, jnp.float32)
    order = np.random.default_rng(0).permutation(40)

    def loss_fn(params, batch):
        logits = model.apply({"params": params}, batch[0], train=False)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    data = dataset.train.x[order], y[order]
    loss = analysis.DatasetLoss.from_examples(loss_fn, data, 40)
    found = numbers(studied, run_dir, "sam")
    of_measure = {
        ("sharpness", 0.1): analysis.sharpness,
        ("sharpness", 0.4): analysis.sharpness,
        ("adaptive_sharpness", 1.0): analysis.adaptive_sharpness,
    }
    for p in (2.0, math.inf):
        for (name, rho), measure in of_measure.items():
            expected = measure(loss, params, rho, p=p, steps=3, group_size=16).value
            value = found[name, "inf" if p == math.inf else p, rho, None]
            assert value == pytest.approx(float(expected), rel=1e-3)
    whole = analysis.sharpness(loss, params, 0.1, steps=3).value
    assert found["sharpness", 2.0, 0.1, None] > 1.01 * whole


def test_stability_is_measured_from_the_weights_and_from_random_starts(studied, run_dir, archive):
    found = numbers(studied, run_dir, "sgd")
    rhos = sorted({rho for name, _, rho, _ in found if name == "cosine"})
    assert rhos == [0.0, 0.04, 0.08, 0.1, 0.12, 0.16, 0.2, 0.24, 0.28, 0.32, 0.36, 0.4]
    loss_of, params = loss_and_params(archive, run_dir, "sgd", 0)
    w, unravel = ravel_pytree(params)
    loss = lambda v: loss_of(unravel(v))
    g = jax.grad(loss)(w)
    there = w + 0.4 * g / jnp.linalg.norm(g)
    h = jax.grad(loss)(there)
    cosine = g @ h / jnp.linalg.norm(g) / jnp.linalg.norm(h)
    assert found["start_loss", None, None, 0.0] == pytest.approx(float(loss(w)), rel=1e-4)
    assert found["perturbed_loss", None, 0.4, 0.0] == pytest.approx(float(loss(there)), rel=1e-4)
    assert found["cosine", None, 0.4, 0.0] == pytest.approx(float(cosine), abs=1e-4)
    starts = [found["start_loss", None, None, gamma] for gamma in (0.0, 0.3)]
    assert starts[0] * 1.01 < starts[1] < starts[0] + 2


def test_tables_of_several_runs_fit_the_terminal(studied, run_dir, kept):
    _, content, printed = studied
    assert [run["directory"] for run in content["runs"]] == [str(run_dir), str(kept)]
    assert len(content["networks"]) == 2 + 6
    assert max(map(len, printed.split("\n\nnot shown")[0].splitlines())) <= 80
    name = os.path.relpath(run_dir, os.path.commonpath([run_dir, kept]))
    found = numbers(studied, run_dir, "sam")
    value = found["sharpness", 2.0, 0.1, None]
    assert re.search(rf"^{name} +sam +2 +[\d.]+ +{value:.3f}", printed, re.MULTILINE)
    value = found["cosine", None, 0.1, 0.3]
    assert re.search(rf"^{name} +sam +2 +0\.3 .* {value:.3f} ", printed, re.MULTILINE)
    text = " ".join(printed.split())
    assert "not shown, for lack of width: " in text
    assert "within ‖ε‖ ≤ ρ, p = 2, ∞, ρ = 0.1, 0.4, mean of groups of 16 examples" in text


def test_figures_of_studies(studied, kept, monkeypatch):
    """Lines at the end and at the snapshots, of which three are chosen, on one scale."""
    for name in ("epochs.png", "radii.png", "stability.png", "slices.png", "planes.png"):
        assert (studied[0] / name).read_bytes().startswith(b"\x89PNG")
    drawn = {}
    monkeypatch.setattr(figures, "png", lambda figure, title="": drawn.setdefault(title, figure))
    networks = [n for n in open_run(kept).networks if n.name == "sam"]
    first = [measures.Measured("", network, {}) for network in networks]
    files = figures.slices(Losses(), first)
    panels = files["slices.png"].axes
    assert [axes.get_title() for axes in panels] == ["epoch 2", "epoch 4", "last epoch"]
    assert len({axes.get_ylim() for axes in panels}) == 1
    lows = [axes.lines[0].get_ydata()[20] for axes in panels]
    curve = json.loads((kept / "results.json").read_text())["methods"][1]["seeds"][0]["curves"]
    np.testing.assert_allclose(lows, [curve["train_loss"][e - 1] for e in (2, 4, 5)], rtol=1e-4)
    assert any("2 of 2 snapshots, evenly chosen" in title for title in drawn)
    monkeypatch.setattr(figures, "SNAPSHOTS", 1)
    panels = figures.slices(Losses(), first)["slices.png"].axes
    assert [axes.get_title() for axes in panels] == ["epoch 2", "last epoch"]


def test_networks_that_diverged_are_said_to_have(archive, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["--dataset", f"npz:{archive}", "--methods", "sgd", "--lr", "1e30"]
    arguments += ["--epochs", "2", "--seeds", "1", "--batch-size", "12", "--out", str(out)]
    assert main(["compare", *arguments]) == 2  # the results are there
    capsys.readouterr()
    assert main(["analyze", str(out), *STEPS]) == 0
    printed = capsys.readouterr().out
    assert "diverged" in printed
    assert "nan" not in printed
    assert of(json.loads((out / "analysis.json").read_text()), "sgd", 0)["lambda_1"] is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rho": (0.1, 0.0)}, "--rho 0: use a number above 0"),
        ({"rho": ()}, "--rho: no value is given; give one or several"),
        ({"adaptive_rho": (float("nan"),)}, "--adaptive-rho nan"),
        ({"p": (0.5,)}, "--p 0.5: use at least 1, or inf"),
        ({"m": 41}, "--m 41: 40 examples are measured; use at most as many"),
        ({"measures": ("hessian",)}, "--measures hessian: unknown; use one of sharpness, "),
        ({"gamma": (0.0, 0.2)}, "--gamma 0, 0.2: is of stability, which is not measured; add it"),
        ({"measures": ("stability",), "gamma": (-0.1,)}, "--gamma -0.1: use a number of at least"),
        ({"measures": ("stability",), "noise_scale": "kernel"}, "--noise-scale kernel: unknown"),
        ({"steps": 0}, "--steps 0: use an integer of at least 1"),
        ({"lanczos_steps": 4}, "--lanczos-steps 4: use an integer of at least 5"),
        ({"seeds": 0}, "--seeds 0"),
    ],
)
def test_options_out_of_range(run_dir, change, message):
    with pytest.raises(UserError, match=message):
        command.run(Analyze((run_dir,), **change))


def test_runs_that_cannot_be_measured_together(run_dir, kept, tmp_path, capsys):
    for arguments, message in {
        (): "RUN_DIR: none is given",
        (tmp_path,): "holds no results.json and params.npz",
        (run_dir, kept): "RUN_DIR: there are several; give --out DIR for the files",
        (run_dir, run_dir, "--out", tmp_path): f"RUN_DIR {run_dir}: is given twice; give each run",
    }.items():
        assert main(["analyze", *map(str, arguments)]) == 2
        assert message in capsys.readouterr().err


def test_data_that_changed(run_dir, tmp_path, archive):
    found = json.loads((run_dir / "results.json").read_text())
    found["dataset"]["sha256"] = "0"
    (tmp_path / "results.json").write_text(json.dumps(found))
    (tmp_path / "params.npz").write_bytes((run_dir / "params.npz").read_bytes())
    with pytest.raises(UserError, match="contents have changed"):
        command.run(Analyze((tmp_path,)))


def test_batch_norm_is_measured_with_its_running_statistics(tmp_path, monkeypatch):
    """The loss alone: to compile the Hessian of a convolutional network takes minutes here."""

    def measure(network, losses, options):
        variables = network.load()
        value = float(losses(network)(network.labels(), variables)(variables["params"]))
        return dict.fromkeys(measures.quantities(options), value)

    monkeypatch.setattr(command, "measure", measure)
    rng = np.random.default_rng(0)
    arrays = {
        "x_train": rng.normal(size=(24, 8, 8, 3)),
        "y_train": np.arange(24) % 3,
        "x_test": rng.normal(size=(6, 8, 8, 3)),
        "y_test": np.arange(6) % 3,
    }
    data, out = f"npz:{tmp_path / 'images.npz'}", tmp_path / "out"
    np.savez(tmp_path / "images.npz", **arrays)
    arguments = ["--dataset", data, "--model", "tiny", "--epochs", "1", "--label-noise", "0"]
    arguments += ["--method", "sgd", "--batch-size", "8", "--out", str(out)]
    assert main(["train", *arguments]) == 0
    assert main(["analyze", str(out)]) == 0
    dataset = load(data)
    model = build("tiny", dataset.shape, 3, jnp.float32)
    variables = load_params(out / "params.npz")["sgd"][0]
    assert variables["batch_stats"]
    logits = model.apply(variables, dataset.train.x, train=False)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, dataset.train.y)
    found = json.loads((out / "analysis.json").read_text())
    assert of(found, "sgd", 0, 1)["sharpness"] == pytest.approx(float(losses.mean()), rel=1e-5)
    assert (out / "planes.png").is_file()
    (network,) = open_run(out).networks  # for stability: as in training, but each example once
    loss = Losses()(network, group=9, train=True)(network.labels(), variables)
    order, expected = np.random.default_rng(0).permutation(24), []
    for batch in order[:9], order[9:18], np.r_[order[18:], order[:3]]:
        logits, _ = model.apply(
            variables, dataset.train.x[batch], train=True, mutable=["batch_stats"]
        )
        y = dataset.train.y[batch]
        expected += [*optax.softmax_cross_entropy_with_integer_labels(logits, y)]
    mean = float(np.mean(expected[:24]))
    assert float(loss(variables["params"])) == pytest.approx(mean, rel=1e-5)
    assert mean != pytest.approx(float(losses.mean()), rel=1e-3)
