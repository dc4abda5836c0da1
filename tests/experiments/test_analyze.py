"""``analyze`` and opened runs: measures of the networks, against the library's own."""

import functools
import json
import math
import operator
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
from sam_optax.experiments import open_run
from sam_optax.experiments.data.dataset import load
from sam_optax.experiments.data.labels import corrupt
from sam_optax.experiments.networks.registry import build
from sam_optax.experiments.reporting.snapshots import Snapshots, load_params

pytestmark = pytest.mark.slow


def train(archive, out, *more, noise="0.4"):
    arguments = ["--dataset", f"npz:{archive}", "--methods", "sgd", "sam", "--batch-size", "12"]
    return main(["compare", *arguments, "--label-noise", noise, *more, "--out", str(out)])


@pytest.fixture(scope="module")
def run_dir(archive, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "out"
    assert train(archive, out, "--epochs", "2", "--seeds", "2", noise="0.25") == 0
    return out


@pytest.fixture(scope="module")
def kept(archive, tmp_path_factory):
    """A run with snapshots, from one seed."""
    out = tmp_path_factory.mktemp("kept") / "out"
    assert train(archive, out, "--epochs", "5", "--seeds", "1", "--save-every", "2") == 0
    return out


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


def numbers(out, **chosen):
    """The numbers of a network, by measure, norm, radius and noise."""
    rows = json.loads((out / "analysis.json").read_text())["numbers"]
    rows = [row for row in rows if chosen.items() <= row.items()]
    return {(r["measure"], r["p"], r["rho"], r["gamma"]): r["value"] for r in rows}


SHARPNESS, LAMBDA = ("sharpness", 2.0, 0.5, None), ("lambda_1", None, None, None)
SLICES = {"slices", "planes"}


def test_numbers_over_epochs_are_the_library_s(kept, archive, capsys):
    """The networks of the snapshots are those that the curves of the results saw."""
    assert main(["analyze", str(kept)]) == 0
    printed = capsys.readouterr().out
    assert "element-wise, η = 0, biases not normalized" in " ".join(printed.split())
    curves = {
        method["name"]: method["seeds"][0]["curves"]
        for method in json.loads((kept / "results.json").read_text())["methods"]
    }
    networks = open_run(kept).networks
    assert [(n.method, n.epoch) for n in networks] == [(m, e) for m in curves for e in (2, 4, 5)]
    for network in networks:
        name, epoch = network.method, network.epoch
        found = numbers(kept, method=name, seed=0, epoch=epoch)
        assert network.score == curves[name]["test_accuracy"][epoch - 1]
        assert found["test accuracy (%)", None, None, None] == pytest.approx(100 * network.score)
        value = found[SHARPNESS]
        assert re.search(rf"^sharpness +0.5 +{name} +{epoch} +{value:.3f}", printed, re.M)
        file = "params.npz" if epoch == 5 else f"params_epoch_{epoch}.npz"
        loss, params = loss_and_params(archive, kept, name, 0, 0.4, file)
        assert float(loss(params)) == pytest.approx(curves[name]["train_loss"][epoch - 1], rel=1e-5)
        one_step = float(analysis.loss_rise(loss, params, sam_optax.sam(0.5)))
        assert one_step * (1 - 1e-3) <= value < 4 * one_step
    test, rng = load(f"npz:{archive}").test, np.random.default_rng(0)
    model = build("mlp", (6,), 3, jnp.float32)
    logits, y = model.apply(network.load(), test.x, train=False), corrupt(test.y, 0.4, 3, rng)
    expected = float(optax.softmax_cross_entropy_with_integer_labels(logits, y).mean())
    assert float(network.loss(network.load(), "test")(params)) == pytest.approx(expected, rel=1e-5)
    expected = analysis.hessian_eigenvalues(loss, params, 1).values[0]
    assert found[LAMBDA] == pytest.approx(float(expected), rel=2e-2)
    drawn, measures = {path.stem for path in kept.glob("*.png")}, ("sharpness", "lambda_ratio")
    assert {f"{name}_over_epoch" for name in measures} | SLICES <= drawn
    assert not drawn & {"stability", "sharpness_over_rho"}


def test_studies_of_several_runs(run_dir, kept, archive, tmp_path, capsys, monkeypatch):
    """Grids, groups and stability of two runs together, of one seed."""
    monkeypatch.chdir(run_dir.parents[1])
    run, other = (str(of.relative_to(run_dir.parents[1])) for of in (run_dir, kept))
    arguments = ["analyze", run, other, "--out", str(tmp_path), "--seeds", "1"]
    arguments += ["--measures", "sharpness", "adaptive_sharpness", "stability", "slices"]
    arguments += ["--rho", "0.1", "0.4", "--p", "2", "inf", "--m", "16"]
    assert main([*arguments, "--gamma", "0", "0.3", "--noise-scale", "relative"]) == 0
    found = numbers(tmp_path, run=run, method="sam")
    of_examples, params = loss_and_params(archive, run_dir, "sam", 0)
    order = jnp.asarray(np.random.default_rng(0).permutation(40))
    loss = analysis.DatasetLoss.from_examples(of_examples, order, 40)
    for p in (2.0, math.inf):
        for rho, measure in {0.1: analysis.sharpness, 1.0: analysis.adaptive_sharpness}.items():
            expected = measure(loss, params, rho, p=p, group_size=16).value
            value = found[measure.__name__, "inf" if p == math.inf else p, rho, None]
            assert value == pytest.approx(float(expected), rel=1e-3)
    assert found["sharpness", 2.0, 0.1, None] > 1.01 * analysis.sharpness(loss, params, 0.1).value
    rhos = sorted({rho for name, _, rho, _ in found if name == "cosine"})
    assert rhos == [0.0, 0.04, 0.08, 0.1, 0.12, 0.16, 0.2, 0.24, 0.28, 0.32, 0.36, 0.4]
    for i, gamma in enumerate((0.0, 0.3)):
        curves = analysis.gradient_stability(loss, params, [0.1, 0.4], [0.0, 0.3])
        cosine, after = (x[i].mean(0) for x in (curves.cosine, curves.loss))
        start = found["start_loss", None, None, gamma]
        assert start == pytest.approx(float(curves.start_loss[i].mean()), rel=1e-4)
        for j, rho in enumerate((0.1, 0.4)):
            assert found["cosine", None, rho, gamma] == pytest.approx(float(cosine[j]), abs=1e-4)
            value = found["perturbed_loss", None, rho, gamma]
            assert value == pytest.approx(float(after[j]), rel=1e-4)
    printed, value = capsys.readouterr().out, found["cosine", None, 0.1, 0.3]
    line = rf"^cosine +– +0\.1 +0\.3 +{run} +sam +2 +{value:.3f} *$"
    assert re.search(line, printed, re.M)
    assert not re.search("^cosine .* 0.04 ", printed, re.M)
    drawn = {"sharpness_over_epoch", "adaptive_sharpness_over_epoch", "sharpness_over_rho"}
    assert {path.stem for path in tmp_path.glob("*.png")} == drawn | {"stability", *SLICES}


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
    networks = open_run(copy).networks
    said = capsys.readouterr().err
    assert f"{copy}/params_epoch_2.npz: it is of another run, and left out; " in said
    assert f"{copy}/params_epoch_4.npz: it is missing, and left out; " in said
    assert [(n.method, n.epoch) for n in networks] == [("sgd", 5), ("sam", 5)]
    (copy / "params.npz").write_bytes(changed)
    assert main(["analyze", str(copy)]) == 2
    assert "params.npz: is of another run than results.json" in capsys.readouterr().err


NAME = "sam/0/params/Dense_1/bias"


def array(content=None):
    """Replaces an array of the params by another or by bytes, or removes it."""

    def change(run):
        with zipfile.ZipFile(run / "params.npz") as old:
            mark, members = old.comment, {name: old.read(name) for name in old.namelist()}
        with zipfile.ZipFile(run / "params.npz", "w") as new:
            new.comment = mark
            for name, of in members.items():
                if NAME not in name:
                    new.writestr(name, of)
            if isinstance(content, bytes):
                new.writestr(f"{NAME}.npy", content)
            elif content is not None:
                with new.open(f"{NAME}.npy", "w") as file:
                    np.save(file, content)

    return change


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
    f"{NAME} is float32[7, 3], but float32[": array(np.zeros((7, 3), np.float32)),
    "holds no results.json and params": lambda run: (run / "results.json").write_text('{"a": 1}'),
    "missing required field `settings`": without("settings"),
    "'lr')": without("settings", "lr"),
    "(KeyError: 'test_accuracy')": without("methods", 0, "seeds", 0, "curves", "test_accuracy"),
    "(IndexError": without("methods", 0, "seeds", 0, "curves", "test_accuracy", 0),
}


@pytest.mark.parametrize(("message", "change"), WRONG.items())
def test_files_that_no_run_has_written(message, change, copy, capsys):
    change(copy)
    assert main(["analyze", str(copy)]) == 2  # before anything is measured
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert str(copy) in line


def test_networks_that_diverged_are_said_to_have(archive, tmp_path, capsys):
    out = tmp_path / "out"
    more = "--methods", "sgd", "--lr", "1e30", "--epochs", "2", "--seeds", "1"
    assert train(archive, out, *more) == 2  # the results are there
    printed = capsys.readouterr()
    assert re.search(r"^sgd +diverged", printed.out, re.M)
    advice = "sam_optax: The training has diverged; give a smaller --lr or radius, or --clip."
    assert printed.err.splitlines()[-1] == advice
    assert main(["analyze", str(out)]) == 2
    said = capsys.readouterr().err
    assert f"{out}/params.npz: sgd, seed 0, has diverged, and is not measured." in said
    assert "RUN_DIR: all networks have diverged" in said


def test_what_cannot_be_measured(run_dir, copy, arrays, tmp_path, capsys):
    text = (copy / "results.json").read_text()
    (copy / "results.json").write_text(re.sub('"sha256": "[0-9a-f]+"', '"sha256": "0"', text))
    np.savez(tmp_path / "other.npz", **{**arrays, "y_test": arrays["y_test"][::-1]})
    other = tmp_path / "other"
    assert train(tmp_path / "other.npz", other, "--epochs", "1", "--seeds", "1") == 0
    for arguments, message in {
        (): "RUN_DIR: none is given",
        (copy.parent,): "holds no results.json and params.npz",
        (copy,): "contents have changed since the run",
        (run_dir, copy): "RUN_DIR: there are several; give --out DIR for the files",
        (run_dir, other, "--out", copy): f"{other}: was trained on other data than {run_dir}",
        (run_dir, "--rho", "0.1", "0"): "--rho 0: use a number above 0",
        (run_dir, "--p", "0.5"): "--p 0.5: use at least 1, or inf",
        (run_dir, "--measures", "hessian"): "--measures hessian: unknown; use one of sharpness, ",
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
    (network,), train = open_run(out).networks, load(data).train
    model, variables = build("tiny", (8, 8, 3), 3, jnp.float32), network.load()

    def losses(i, **how):
        logits = model.apply(variables, train.x[i], **how)
        logits = logits[0] if how["train"] else logits
        return optax.softmax_cross_entropy_with_integer_labels(logits, train.y[i])

    mean = float(losses(np.arange(24), train=False).mean())
    assert float(network.loss(variables)(variables["params"])) == pytest.approx(mean, rel=1e-5)
    # For stability: as in training, but each example once.
    order = np.random.default_rng(0).permutation(24)
    groups = order[:9], order[9:18], np.r_[order[18:], order[:3]]
    each = [losses(i, train=True, mutable=["batch_stats"]) for i in groups]
    value = float(network.loss(variables, size=9, train=True)(variables["params"]))
    assert value == pytest.approx(float(np.concatenate(each)[:24].mean()), rel=1e-5)
    assert value != pytest.approx(mean, rel=1e-3)
