"""``analyze``: measures of a run's networks, against the library's own and dense ones."""

import contextlib
import csv
import functools
import io
import json
import math
import operator
import os
import re
import shutil
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sam_optax
from sam_optax import analysis
from sam_optax.__main__ import main
from sam_optax.experiments.analyze import command, figures
from sam_optax.experiments.data.dataset import load
from sam_optax.experiments.data.labels import corrupt
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.finished import open_runs
from sam_optax.experiments.networks.registry import build
from sam_optax.experiments.reporting.snapshots import Snapshots, load_params

pytestmark = pytest.mark.slow

STEPS = ["--steps", "3", "--lanczos-steps", "8"]


def train(archive, out, *more, noise="0.4"):
    arguments = ["--dataset", f"npz:{archive}", "--methods", "sgd", "sam", "--batch-size", "12"]
    return main(["compare", *arguments, "--label-noise", noise, *more, "--out", str(out)])


@pytest.fixture(scope="module")
def run_dir(archive, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "out"
    assert train(archive, out, "--epochs", "2", "--seeds", "2", noise="0.25") == 0
    return out


@pytest.fixture(scope="module")
def analyzed(run_dir):
    assert main(["analyze", str(run_dir), *STEPS]) == 0
    return json.loads((run_dir / "analysis.json").read_text())


def loss_and_params(archive, run_dir, name, seed, noise=0.25, file="params.npz"):
    """The loss of a network as ``(params, indices of examples) -> losses``."""
    dataset = load(f"npz:{archive}")
    model = build("mlp", dataset.shape, dataset.classes, jnp.float32)
    x, clean = jnp.asarray(dataset.train.x), dataset.train.y
    y = jnp.asarray(corrupt(clean, noise, 3, np.random.default_rng([seed, 0])))
    variables = load_params(run_dir / file)[name][seed]

    def loss(params, i=...):
        logits = model.apply({"params": params}, x[i], train=False)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y[i]).mean()

    return loss, jax.tree.map(jnp.asarray, variables["params"])


def of(analyzed, name, seed=0, epoch=2, **more):
    """The numbers of a network, by measure, norm, radius and noise."""
    chosen = {"method": name, "seed": seed, "epoch": epoch, **more}
    (found,) = (n["measured"] for n in analyzed["networks"] if chosen.items() <= n.items())
    return {tuple(row.values())[:4]: row["value"] for row in found}


SHARPNESS, LAMBDA = ("sharpness", 2.0, 0.5, None), ("lambda_1", None, None, None)


def test_files_and_table(run_dir, analyzed, archive, capsys):
    """The numbers are the library's."""
    assert main(["analyze", str(run_dir), *STEPS, "--seeds", "1"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for text in ("λ₁/λ₅", "of 1 seed", "element-wise, η = 0, biases not normalized"):
        assert text in printed
    biases = {"biases": "not normalized"}
    assert analyzed["adaptive_sharpness"] == {"normalization": "elementwise", "eta": 0.0, **biases}
    with (run_dir / "analysis.csv").open() as file:
        heading, *lines = csv.reader(file)
    assert heading == ["run", "method", "seed", "epoch", "measure", "p", "rho", "gamma", "value"]
    found = of(analyzed, "sam")
    assert [line[-1] for line in lines[5:]] == [*map(str, found.values())]
    figures = ("epochs.png", "radii.png", "stability.png", "slices.png", "planes.png")
    assert [(run_dir / name).exists() for name in figures] == [False] * 3 + [True] * 2
    networks = [(n["method"], n["seed"]) for n in analyzed["networks"]]
    assert networks == [("sgd", 0), ("sgd", 1), ("sam", 0), ("sam", 1)]
    loss, params = loss_and_params(archive, run_dir, "sam", 0)
    one_step = float(analysis.loss_rise(loss, params, sam_optax.sam(0.5)))
    assert one_step * (1 - 1e-3) <= found[SHARPNESS] < 3 * one_step
    expected = analysis.hessian_eigenvalues(loss, params, 1).values[0]
    assert found[LAMBDA] == pytest.approx(float(expected), rel=2e-2)


@pytest.fixture(scope="module")
def kept(archive, tmp_path_factory):
    """A run with snapshots, from one seed."""
    out = tmp_path_factory.mktemp("kept") / "out"
    assert train(archive, out, "--epochs", "5", "--seeds", "1", "--save-every", "2") == 0
    return out


def test_snapshots_are_measured_over_epochs(kept, archive, capsys):
    """The networks of the snapshots are those that the curves of the results saw."""
    assert main(["analyze", str(kept), *STEPS]) == 0
    printed = capsys.readouterr().out
    assert (kept / "epochs.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((kept / "analysis.json").read_text())
    results = json.loads((kept / "results.json").read_text())
    for method in results["methods"]:
        name, curves = method["name"], method["seeds"][0]["curves"]
        sharpness = {epoch: of(found, name, 0, epoch)[SHARPNESS] for epoch in (2, 4, 5)}
        assert len({*sharpness.values()}) == 3
        for epoch, value in sharpness.items():
            shown = f"{100 * curves['test_accuracy'][epoch - 1]:.2f}"
            assert re.search(rf"{name} +{epoch} +{shown} +{value:.3f}", printed)
            file = "params.npz" if epoch == 5 else f"params_epoch_{epoch}.npz"
            loss, params = loss_and_params(archive, kept, name, 0, 0.4, file)
            assert float(loss(params)) == pytest.approx(curves["train_loss"][epoch - 1], rel=1e-5)
    assert len(found["networks"]) == 6
    assert len([*kept.glob("params*.npz")]) == 3


@pytest.fixture
def copy(kept, tmp_path):
    return shutil.copytree(kept, tmp_path / "run")


def test_snapshots_of_another_run_are_left_out(kept, copy, archive, capsys, monkeypatch):
    """Files of a run that was killed in the directory of a finished one, and a missing file."""

    def killed(self, epoch, variables, save=Snapshots.save):
        save(self, epoch, variables)
        raise KeyboardInterrupt

    monkeypatch.setattr(Snapshots, "save", killed)
    assert train(archive, copy, "--epochs", "9", "--seeds", "1", "--save-every", "2") == 130
    changed = (copy / "params_epoch_2.npz").read_bytes()
    assert changed != (kept / "params_epoch_2.npz").read_bytes()
    (copy / "params_epoch_4.npz").unlink()
    capsys.readouterr()
    assert main(["analyze", str(copy), "--measures", "slices"]) == 0
    said = capsys.readouterr().err
    assert f"{copy}/params_epoch_2.npz: it is of another run, and left out; " in said
    assert f"{copy}/params_epoch_4.npz: it is missing, and left out; " in said
    found = json.loads((copy / "analysis.json").read_text())["networks"]
    assert [(n["method"], n["epoch"]) for n in found] == [("sgd", 5), ("sam", 5)]
    (copy / "params.npz").write_bytes(changed)
    assert main(["analyze", str(copy)]) == 2
    assert "params.npz: is of another run than results.json" in capsys.readouterr().err


NAME = "sam/0/params/Dense_1/bias"


def array(content=None):
    """Replaces an array of the params, or removes it."""

    def change(run):
        with zipfile.ZipFile(run / "params.npz") as old:
            members = {name: old.read(name) for name in old.namelist() if NAME not in name}
        if content is not None:
            members[f"{NAME}.npy"] = content
        with zipfile.ZipFile(run / "params.npz", "w") as new:
            new.comment = old.comment
            for name, of in members.items():
                new.writestr(name, of)

    return change


def npy(value):
    np.save(file := io.BytesIO(), value)
    return file.getvalue()


def without(*place):
    """Removes a field of the results."""

    def change(run):
        found = json.loads((run / "results.json").read_text())
        del functools.reduce(operator.getitem, place[:-1], found)[place[-1]]
        (run / "results.json").write_text(json.dumps(found))

    return change


WRONG = {
    "params.npz: is damaged": lambda run: (run / "params.npz").write_bytes(b"PK\3\4"),
    "epoch_2.npz: is damaged": lambda run: (run / "params_epoch_2.npz").write_bytes(b"{}"),
    "params.npz: is damaged (the magic string": array(b"not an array"),
    f"params.npz: has no array {NAME};": array(),
    f"{NAME} is float32[7, 3], but float32[": array(npy(np.zeros((7, 3), np.float32))),
    f"{NAME} is <U4[256], but float32[256]": array(npy(np.full(256, "text"))),
    "holds no results.json and params": lambda run: (run / "results.json").write_text('{"a": 1}'),
    "missing required field `settings`": without("settings"),
    "(KeyError: 'dtype')": without("settings", "dtype"),
    "'lr')": without("settings", "lr"),
    "missing required field `name` - at `$.dataset`": without("dataset", "name"),
    "missing required field `seeds` - at `$.methods[0]`": without("methods", 0, "seeds"),
    "(KeyError: 'test_accuracy')": without("methods", 0, "seeds", 0, "curves", "test_accuracy"),
}


@pytest.mark.parametrize(("message", "change"), WRONG.items())
def test_files_that_no_run_has_written(message, change, copy, capsys):
    change(copy)
    assert main(["analyze", str(copy)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert str(copy) in line


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


def test_numbers_of_studies_are_the_library_s(studied, run_dir, archive):
    found = of(studied[1], "sam", run=str(run_dir))
    of_examples, params = loss_and_params(archive, run_dir, "sam", 0)
    order = jnp.asarray(np.random.default_rng(0).permutation(40))
    loss = analysis.DatasetLoss.from_examples(of_examples, order, 40)
    for p in (2.0, math.inf):
        for rho, measure in {0.1: analysis.sharpness, 1.0: analysis.adaptive_sharpness}.items():
            expected = measure(loss, params, rho, p=p, steps=3, group_size=16).value
            value = found[measure.__name__, "inf" if p == math.inf else p, rho, None]
            assert value == pytest.approx(float(expected), rel=1e-3)
    whole = analysis.sharpness(loss, params, 0.1, steps=3).value
    assert found["sharpness", 2.0, 0.1, None] > 1.01 * whole
    rhos = sorted({rho for name, _, rho, _ in found if name == "cosine"})
    assert rhos == [0.0, 0.04, 0.08, 0.1, 0.12, 0.16, 0.2, 0.24, 0.28, 0.32, 0.36, 0.4]
    for gamma in (0.0, 0.3):
        curves = analysis.gradient_stability(loss, params, [0.1, 0.4], [gamma], draws=2)
        cosine, after = (x[0].mean(0) for x in (curves.cosine, curves.loss))
        start = found["start_loss", None, None, gamma]
        assert start == pytest.approx(float(curves.start_loss.mean()), rel=1e-4)
        for i, rho in enumerate((0.1, 0.4)):
            assert found["cosine", None, rho, gamma] == pytest.approx(float(cosine[i]), abs=1e-4)
            value = found["perturbed_loss", None, rho, gamma]
            assert value == pytest.approx(float(after[i]), rel=1e-4)


def test_tables_of_several_runs_fit_the_terminal(studied, run_dir, kept):
    _, content, printed = studied
    assert [run["directory"] for run in content["runs"]] == [str(run_dir), str(kept)]
    assert len(content["networks"]) == 2 + 6
    assert max(map(len, printed.split("\n\nnot shown")[0].splitlines())) <= 80
    name = os.path.relpath(run_dir, os.path.commonpath([run_dir, kept]))
    found = of(content, "sam", run=str(run_dir))
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
    (opened,) = open_runs([kept])
    networks = [network for network in opened.networks if network.name == "sam"]
    files = figures.slices(networks)
    panels = files["slices.png"].axes
    assert [axes.get_title() for axes in panels] == ["epoch 2", "epoch 4", "last epoch"]
    assert len({axes.get_ylim() for axes in panels}) == 1
    lows = [axes.lines[0].get_ydata()[20] for axes in panels]
    curve = json.loads((kept / "results.json").read_text())["methods"][1]["seeds"][0]["curves"]
    np.testing.assert_allclose(lows, [curve["train_loss"][e - 1] for e in (2, 4, 5)], rtol=1e-4)
    assert any("2 of 2 snapshots, evenly chosen" in title for title in drawn)
    monkeypatch.setattr(figures, "SNAPSHOTS", 1)
    panels = figures.slices(networks)["slices.png"].axes
    assert [axes.get_title() for axes in panels] == ["epoch 2", "last epoch"]


def test_networks_that_diverged_are_said_to_have(archive, tmp_path, capsys):
    out = tmp_path / "out"
    more = "--methods", "sgd", "--lr", "1e30", "--epochs", "2", "--seeds", "1"
    assert train(archive, out, *more) == 2  # the results are there
    capsys.readouterr()
    assert main(["analyze", str(out), *STEPS]) == 0
    printed = capsys.readouterr().out
    assert "diverged" in printed
    assert "nan" not in printed
    assert of(json.loads((out / "analysis.json").read_text()), "sgd")[LAMBDA] is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rho": (0.1, 0.0)}, "--rho 0: use a number above 0"),
        ({"p": (0.5,)}, "--p 0.5: use at least 1, or inf"),
        ({"m": 41}, "--m 41: 40 examples are measured; use at most as many"),
        ({"measures": ("hessian",)}, "--measures hessian: unknown; use one of sharpness, "),
        ({"gamma": (0.0, 0.2)}, "--gamma 0, 0.2: is of stability, which is not measured; add it"),
        ({"lanczos_steps": 4}, "--lanczos-steps 4: use an integer of at least 5"),
    ],
)
def test_options_out_of_range(run_dir, change, message):
    with pytest.raises(UserError, match=message):
        command.run(command.Analyze((run_dir,), **change))


def test_runs_that_cannot_be_measured_together(run_dir, copy, capsys):
    text = (copy / "results.json").read_text()
    (copy / "results.json").write_text(re.sub('"sha256": "[0-9a-f]+"', '"sha256": "0"', text))
    for arguments, message in {
        (): "RUN_DIR: none is given",
        (copy.parent,): "holds no results.json and params.npz",
        (copy,): "contents have changed since the run",
        (run_dir, copy): "RUN_DIR: there are several; give --out DIR for the files",
        (run_dir, run_dir, "--out", copy): f"RUN_DIR {run_dir}: is given twice; give each run",
    }.items():
        assert main(["analyze", *map(str, arguments)]) == 2
        assert message in capsys.readouterr().err


def test_batch_norm_is_measured_with_its_running_statistics(tmp_path):
    """The loss alone: to compile the Hessian of a convolutional network takes minutes here."""
    x, y = np.random.default_rng(0).normal(size=(24, 8, 8, 3)), np.arange(24) % 3
    np.savez(tmp_path / "images.npz", x_train=x, y_train=y, x_test=x[:6], y_test=y[:6])
    data, out = f"npz:{tmp_path / 'images.npz'}", tmp_path / "out"
    arguments = ["--dataset", data, "--model", "tiny", "--epochs", "1", "--label-noise", "0"]
    arguments += ["--methods", "sgd", "--seeds", "1", "--batch-size", "8", "--out", str(out)]
    assert main(["compare", *arguments]) == 0
    dataset = load(data)
    model = build("tiny", dataset.shape, 3, jnp.float32)
    variables = load_params(out / "params.npz")["sgd"][0]
    assert variables["batch_stats"]

    def losses(i, **how):
        logits = model.apply(variables, dataset.train.x[i], **how)
        logits = logits[0] if how["train"] else logits
        return optax.softmax_cross_entropy_with_integer_labels(logits, dataset.train.y[i])

    ((network,),) = (opened.networks for opened in open_runs([out]))
    mean = float(losses(np.arange(24), train=False).mean())
    loss = network.loss(network.load())
    assert float(loss(variables["params"])) == pytest.approx(mean, rel=1e-5)
    # For stability: as in training, but each example once.
    order = np.random.default_rng(0).permutation(24)
    groups = order[:9], order[9:18], np.r_[order[18:], order[:3]]
    each = [losses(i, train=True, mutable=["batch_stats"]) for i in groups]
    loss = network.loss(variables, group=9, train=True)
    value = float(loss(variables["params"]))
    assert value == pytest.approx(float(np.concatenate(each)[:24].mean()), rel=1e-5)
    assert value != pytest.approx(mean, rel=1e-3)
