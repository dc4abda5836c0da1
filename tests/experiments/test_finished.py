"""Opened runs: their networks, and the loss of these, against those written by hand."""

import functools
import json
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

from sam_optax import analysis
from sam_optax.__main__ import main
from sam_optax.experiments import named, open_run
from sam_optax.experiments.data.dataset import load
from sam_optax.experiments.data.examples import corrupt
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.networks.builtin import build
from sam_optax.experiments.reporting.archive import load_params

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
    """A run from one seed."""
    out = tmp_path_factory.mktemp("kept") / "out"
    assert train(archive, out, "--epochs", "3", "--seeds", "1") == 0
    return out


def loss_and_params(archive, run_dir, name, seed, noise=0.25):
    """The loss of a network as ``(params, indices of examples) -> losses``."""
    dataset = load(f"npz:{archive}")
    model = build("mlp", dataset.shape, dataset.classes)
    x, clean = jnp.asarray(dataset.train.x), dataset.train.y
    y = jnp.asarray(corrupt(clean, noise, 3, np.random.default_rng([seed, 0])))
    variables = load_params(run_dir / "params.npz")[name][seed]

    def loss(params, i=...):
        logits = model.apply({"params": params}, x[i], train=False)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y[i]).mean()

    return loss, jax.tree.map(jnp.asarray, variables["params"])


def test_networks_are_those_of_the_curves(kept, run_dir, archive):
    """With the labels trained on, and as many wrong test labels."""
    for out, noise in ((kept, 0.4), (run_dir, 0.25)):
        methods = json.loads((out / "results.json").read_text())["methods"]
        networks = open_run(out).networks
        runs = [(method["name"], seed) for method in methods for seed in method["seeds"]]
        for network, (name, seed) in zip(networks, runs, strict=True):
            assert (network.method, network.seed) == (name, seed["seed"])
            assert network.score == seed["curves"]["test_accuracy"][-1]
            of_examples, params = loss_and_params(archive, out, name, network.seed, noise)
            loss = float(network.loss(network.load())(params))
            assert loss == pytest.approx(float(of_examples(params)), rel=1e-5)
            assert loss == pytest.approx(seed["curves"]["train_loss"][-1], rel=1e-5)
    network = open_run(kept).networks[-1]
    test, rng = load(f"npz:{archive}").test, np.random.default_rng([0, 2])
    model, variables = build("mlp", (6,), 3), network.load()
    logits, y = model.apply(variables, test.x, train=False), corrupt(test.y, 0.4, 3, rng)
    expected = float(optax.softmax_cross_entropy_with_integer_labels(logits, y).mean())
    found = float(network.loss(variables, "test")(variables["params"]))
    assert found == pytest.approx(expected, rel=1e-5)


def test_examples_of_the_docs_measure_a_run(kept, archive, tmp_path, monkeypatch, capsys):
    """In the order of the pages: each block goes on from those before it."""
    shutil.copytree(kept, tmp_path / "runs" / "mlp")
    monkeypatch.chdir(tmp_path)
    pages = Path(__file__).parents[2] / "docs"
    of_page = [
        re.findall(r"```python\n((?!>>>).*?)```", (pages / name).read_text(), re.DOTALL)
        for name in ("experiments.md", "sharpness.md")
    ]
    blocks = [block for part in of_page for block in part if "analysis" in block]
    assert len(blocks) == 6
    found = {"SMALL": {"dataset": f"npz:{archive}", "epochs": 3, "batch_size": 12}}
    found["SMALL"] |= {"methods": ["sgd", "sam"], "label_noise": 0.4}
    smaller = {"(-1, 1, 21)": "(-1, 1, 3)", "compare(epochs=20": "compare(**SMALL"}
    for block in blocks:
        for whole, small in smaller.items():
            block = block.replace(whole, small)
        exec(compile(block, "docs", "exec"), found)
    loss, params = loss_and_params(archive, kept, "sam", 0, 0.4)
    row = found["rows"][1]
    expected = {
        "sharpness": analysis.sharpness(loss, params, 0.5).value,
        "adaptive": analysis.adaptive_sharpness(loss, params, 1.0).value,
        "λ₁": analysis.hessian_eigenvalues(loss, params, 1).values[0],
    }
    assert row["method"] == "sam"
    for name, value in expected.items():
        assert row[name] == pytest.approx(float(value), rel=2e-2), name
    assert re.search(r"^sam .*NaN", capsys.readouterr().out, re.M)  # one seed has no deviation
    for method in ("sgd", "sam"):
        epochs, rises = found["lines"][method].positions, found["lines"][method].values
        assert epochs.tolist() == [1, 2, 3]
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
    (network,) = (of for of in open_run(kept).networks if of.method == "sam")
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


def test_networks_of_another_run_are_refused(copy, archive, tmp_path):
    assert train(archive, tmp_path / "other", "--epochs", "2", "--seeds", "1") == 0
    shutil.copy(tmp_path / "other" / "params.npz", copy)
    with pytest.raises(UserError, match=r"params\.npz: is of another run than"):
        open_run(copy)


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
    "params.npz: is damaged (the magic string": array(b"not an array"),
    "is damaged (Object arrays cannot be loaded when allow_pickle=False)": array(np.array([{}])),
    f"params.npz: {NAME} is not the float32[256] of the network": array(),
    f"{NAME} is not the float32[256]": array(np.zeros((7, 3), np.float32)),
    "holds no results.json and params": lambda run: (run / "results.json").write_text('{"a": 1}'),
    "(KeyError: 'settings'); restore": without("settings"),
    "(KeyError: 'test_accuracy')": without("methods", 0, "seeds", 0, "test_accuracy"),
}


@pytest.mark.parametrize(("message", "change"), WRONG.items())
def test_files_that_no_run_has_written(message, change, copy):
    change(copy)
    with pytest.raises(UserError, match=rf"^{copy}.*{re.escape(message)}[^\n]*$"):
        open_run(copy)


def test_networks_that_diverged_have_no_finite_loss(archive, tmp_path, capsys):
    out = tmp_path / "out"
    more = "--methods", "sgd", "--lr", "1e30", "--epochs", "2", "--seeds", "1"
    assert train(archive, out, *more) == 2  # the results are there
    printed = capsys.readouterr()
    assert re.search(r"^sgd +diverged", printed.out, re.M)
    advice = "sam_optax: The training has diverged; give a smaller --lr or radius, or --clip."
    assert printed.err.splitlines()[-1] == advice
    (network,) = open_run(out).networks
    variables = network.load()
    assert not np.isfinite(float(network.loss(variables)(variables["params"])))


def test_data_that_have_changed_are_refused(copy):
    text = (copy / "results.json").read_text()
    (copy / "results.json").write_text(re.sub('"sha256": "[0-9a-f]+"', '"sha256": "0"', text))
    with pytest.raises(UserError, match="contents have changed since the run"):
        open_run(copy)


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
