"""``analyze`` and opened runs: measures of the networks, against the library's own."""

import functools
import json
import math
import operator
import re
import shutil
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tasks

import sam_optax
from sam_optax import analysis
from sam_optax.__main__ import main
from sam_optax.experiments import named, open_run
from sam_optax.experiments.data.dataset import load
from sam_optax.experiments.data.examples import corrupt
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.networks.builtin import build
from sam_optax.experiments.reporting import output
from sam_optax.experiments.reporting.snapshots import load_params

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
    model = build("mlp", dataset.shape, dataset.classes)
    x, clean = jnp.asarray(dataset.train.x), dataset.train.y
    y = jnp.asarray(corrupt(clean, noise, 3, np.random.default_rng([seed, 0])))
    variables = load_params(run_dir / file)[name][seed]

    def loss(params, i=...):
        logits = model.apply({"params": params}, x[i], train=False)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y[i]).mean()

    return loss, jax.tree.map(jnp.asarray, variables["params"])


def numbers(out, **chosen):
    """The numbers of a network, by measure, norm and radius."""
    rows = json.loads((out / "analysis.json").read_text())["numbers"]
    rows = [row for row in rows if chosen.items() <= row.items()]
    return {(row["measure"], row["p"], row["rho"]): row["value"] for row in rows}


SHARPNESS, LAMBDA = ("sharpness", 2.0, 0.5), ("lambda_1", None, None)


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
        assert found["test accuracy (%)", None, None] == pytest.approx(100 * network.score)
        value = found[SHARPNESS]
        assert re.search(rf"^sharpness +2 +0.5 +{name} +{epoch} +{value:.3f}", printed, re.M)
        file = "params.npz" if epoch == 5 else f"params_epoch_{epoch}.npz"
        loss, params = loss_and_params(archive, kept, name, 0, 0.4, file)
        assert float(loss(params)) == pytest.approx(curves[name]["train_loss"][epoch - 1], rel=1e-5)
        one_step = float(analysis.loss_rise(loss, params, sam_optax.sam(0.5)))
        assert one_step * (1 - 1e-3) <= value < 4 * one_step
    test, rng = load(f"npz:{archive}").test, np.random.default_rng([0, 2])
    model = build("mlp", (6,), 3)
    logits, y = model.apply(network.load(), test.x, train=False), corrupt(test.y, 0.4, 3, rng)
    expected = float(optax.softmax_cross_entropy_with_integer_labels(logits, y).mean())
    assert float(network.loss(network.load(), "test")(params)) == pytest.approx(expected, rel=1e-5)
    expected = analysis.hessian_eigenvalues(loss, params, 1).values[0]
    assert found[LAMBDA] == pytest.approx(float(expected), rel=2e-2)


def test_several_runs_norms_and_radii(run_dir, kept, archive, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(run_dir.parents[1])
    run, other = (str(of.relative_to(run_dir.parents[1])) for of in (run_dir, kept))
    arguments = ["analyze", run, other, "--out", str(tmp_path), "--rho", "0.1", "0.4"]
    measures = ["--measures", "sharpness", "adaptive_sharpness"]
    assert main([*arguments, *measures, "--p", "2", "inf"]) == 0
    found = numbers(tmp_path, run=run, method="sam", seed=1)
    loss, params = loss_and_params(archive, run_dir, "sam", 1)
    for p in (2.0, math.inf):
        for rho, measure in {0.1: analysis.sharpness, 1.0: analysis.adaptive_sharpness}.items():
            value = found[measure.__name__, "inf" if p == math.inf else p, rho]
            expected = float(measure(loss, params, rho, p=p).value)
            assert value == pytest.approx(expected, rel=1e-3)
    assert LAMBDA not in found
    of_seeds = [numbers(tmp_path, run=run, method="sam", seed=seed) for seed in (0, 1)]
    values = np.array([of["sharpness", "inf", 0.4] for of in of_seeds])
    mean, width = values.mean(), values.std(ddof=1)
    line = rf"^sharpness +inf +0\.4 +{run} +sam +2 +{mean:.3f} ± {width:.3f} *$"
    assert re.search(line, capsys.readouterr().out, re.M)
    assert [path.name for path in tmp_path.iterdir()] == ["analysis.json"]


def test_examples_of_the_docs_measure_a_run(kept, archive, tmp_path, monkeypatch):
    """In the order of the page: each block goes on from those before it."""
    shutil.copytree(kept, tmp_path / "runs" / "mlp")
    monkeypatch.chdir(tmp_path)
    pages = Path(__file__).parents[2] / "docs"
    of_page = [
        re.findall(r"```python\n((?!>>>).*?)```", (pages / name).read_text(), re.DOTALL)
        for name in ("experiments.md", "sharpness.md")
    ]
    blocks = [block for part in of_page for block in part if "analysis" in block]
    assert len(blocks) == 6
    found = {}
    for block in blocks:
        exec(compile(block.replace("(-1, 1, 21)", "(-1, 1, 3)"), "docs", "exec"), found)
    loss, params = loss_and_params(archive, kept, "sam", 0, 0.4)
    for method in ("sgd", "sam"):
        epochs, rises = found["lines"][method].positions, found["lines"][method].values
        assert epochs.tolist() == [2, 4, 5]
    assert float(rises[-1]) == pytest.approx(
        float(analysis.sharpness(loss, params, 0.5).value), 1e-3
    )
    assert found["planes"]["sam"].values.shape == (3, 3)
    assert found["planes"]["sam"].values[1, 1] == pytest.approx(float(loss(params)), rel=1e-5)
    stable = analysis.gradient_stability(loss, params, [0.0, 0.5, 1.0], [0.0, 0.1])
    np.testing.assert_allclose(found["stability"]["sam"].cosine, stable.cosine, atol=1e-4)
    loss, params = loss_and_params(archive, kept, "sgd", 0, 0.4)
    whole = float(analysis.sharpness(loss, params, 0.5).value)
    assert float(found["m_sharpness"]) == pytest.approx(whole, rel=1e-3)  # 40 examples: one group


def test_batches_of_m_random_examples(kept, archive):
    (network,) = (of for of in open_run(kept).networks if of.last and of.method == "sam")
    of_examples, params = loss_and_params(archive, kept, "sam", 0, 0.4)
    order = np.random.default_rng(0).permutation(40)
    loss = network.loss(network.load(), size=16)
    found = [
        float(loss.loss_fn(params, jax.tree.map(lambda x, i=i: x[i], loss.batches)))
        for i in range(3)
    ]
    expected = [float(of_examples(params, order[i : i + 16])) for i in (0, 16, 32)]
    assert found == pytest.approx(expected, rel=1e-5)
    assert loss.weights.tolist() == [16, 16, 8]
    for wrong in ({"part": "valid"}, {"size": 0}):
        with pytest.raises(UserError, match='use "train" or "test", and at least 1'):
            network.loss(network.load(), **wrong)


@pytest.fixture
def copy(kept, tmp_path):
    return shutil.copytree(kept, tmp_path / "run")


def test_snapshots_of_another_run_are_left_out(kept, copy, archive, capsys, monkeypatch):
    """Files of a run that was killed in the directory of a finished one, and a missing file."""

    def killed(folder, files, write=output.write):
        write(folder, files)
        raise KeyboardInterrupt

    monkeypatch.setattr(output, "write", killed)
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
    "is damaged (Object arrays cannot be loaded when allow_pickle=False)": array(np.array([{}])),
    f"params.npz: {NAME} is not the float32[256] of the network": array(),
    f"{NAME} is not the float32[256]": array(np.zeros((7, 3), np.float32)),
    "holds no results.json and params": lambda run: (run / "results.json").write_text('{"a": 1}'),
    "(KeyError: 'settings'); restore": without("settings"),
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


def test_runs_and_radii_given_twice_count_once(kept, capsys):
    """They are not seeds, whose deviation would be 0."""
    twice = ["--measures", "sharpness", "--rho", "0.5", "0.5", "--p", "2", "2"]
    assert main(["analyze", str(kept), str(kept), *twice]) == 0
    rows = json.loads((kept / "analysis.json").read_text())["numbers"]
    assert sum(row["measure"] == "sharpness" for row in rows) == 6  # methods × epochs
    assert " ± 0.000" not in capsys.readouterr().out


def test_eigenvalues_that_are_not_there(archive, kept, tmp_path, capsys, monkeypatch):
    """Of networks with three weights, and where the fifth is 0."""
    code = "import flax.linen as nn\nNet = lambda: nn.Sequential([lambda x: x[:, :1], LAST])"
    last = "nn.Dense(3, use_bias=False)"
    (tmp_path / "three_weights.py").write_text(code.replace("LAST", last))
    more = "--model", f"{tmp_path / 'three_weights.py'}:Net", "--epochs", "1", "--seeds", "1"
    assert train(archive, tmp_path / "three", *more) == 0
    assert main(["analyze", str(tmp_path / "three"), "--measures", "eigenvalues"]) == 0
    found = numbers(tmp_path / "three", method="sgd")
    assert {measure for measure, *_ in found} == {"test accuracy (%)", "lambda_1", "residual"}
    monkeypatch.setattr(analysis.HessianEigenvalues, "ratio", lambda *_: np.inf)  # λ₅ = 0
    capsys.readouterr()
    assert main(["analyze", str(kept), "--measures", "eigenvalues"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^lambda_ratio .* sam +5 +not finite *$", printed, re.M)
    assert "diverged" not in printed


def test_what_cannot_be_measured(run_dir, copy, arrays, tmp_path, capsys):
    text = (copy / "results.json").read_text()
    (copy / "results.json").write_text(re.sub('"sha256": "[0-9a-f]+"', '"sha256": "0"', text))
    np.savez(tmp_path / "other.npz", **{**arrays, "y_test": arrays["y_test"][::-1]})
    other = tmp_path / "other"
    assert train(tmp_path / "other.npz", other, "--epochs", "1", "--seeds", "1") == 0
    for arguments, message in {
        (copy,): "contents have changed since the run",
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
    options = f"--model {tasks.NETWORKS}:tiny --epochs 1 --label-noise 0 --methods sgd --seeds 1"
    arguments = [*options.split(), "--dataset", data, "--batch-size", "8", "--out", str(out)]
    assert main(["compare", *arguments]) == 0
    (network,), train = open_run(out).networks, load(data).train
    model, variables = named.find(f"{tasks.NETWORKS}:tiny")(3), network.load()

    def losses(i, **how):
        logits = model.apply(variables, train.x[i], **how)
        logits = logits[0] if how["train"] else logits
        return optax.softmax_cross_entropy_with_integer_labels(logits, train.y[i])

    mean = float(losses(np.arange(24), train=False).mean())
    assert float(network.loss(variables)(variables["params"])) == pytest.approx(mean, rel=1e-5)
    # As in training, but each example once.
    order = np.random.default_rng(0).permutation(24)
    groups = order[:9], order[9:18], np.r_[order[18:], order[:3]]
    each = [losses(i, train=True, mutable=["batch_stats"]) for i in groups]
    value = float(network.loss(variables, size=9, train=True)(variables["params"]))
    assert value == pytest.approx(float(np.concatenate(each)[:24].mean()), rel=1e-5)
    assert value != pytest.approx(mean, rel=1e-3)
