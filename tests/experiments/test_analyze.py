"""``analyze``: measures of a run's networks, against the library's own and dense ones."""

import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import sam_optax
from sam_optax.__main__ import main
from sam_optax.experiments import analyze
from sam_optax.experiments.analyze import Analyze
from sam_optax.experiments.data.dataset import load
from sam_optax.experiments.data.labels import corrupt
from sam_optax.experiments.errors import UserError
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


def of(analyzed, name, seed):
    methods = {m["name"]: {n["seed"]: n for n in m["networks"]} for m in analyzed["methods"]}
    return methods[name][seed]


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
    lines = (run_dir / "analysis.csv").read_text().splitlines()
    assert (
        lines[0] == "method,seed,epoch,sharpness,adaptive_sharpness,lambda_1,lambda_ratio,residual"
    )
    assert len(lines) == 3
    assert not (run_dir / "epochs.png").exists()
    assert [m["name"] for m in analyzed["methods"]] == ["sgd", "sam"]
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
    found = json.loads((kept / "analysis.json").read_text())["methods"]
    results = json.loads((kept / "results.json").read_text())
    assert results["settings"]["save_every"]["value"] == 2
    for method, of in zip(found, results["methods"], strict=True):
        assert [network["epoch"] for network in method["networks"]] == [2, 4, 5]
        assert len({network["sharpness"] for network in method["networks"]}) == 3
        accuracies = of["seeds"][0]["curves"]["test_accuracy"]
        for network in method["networks"]:
            shown = f"{100 * accuracies[network['epoch'] - 1]:.2f}"
            row = rf"{method['name']} +{network['epoch']} +{shown} +{network['sharpness']:.3f}"
            assert re.search(row, printed)


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
    assert (
        json.loads((out / "analysis.json").read_text())["methods"][0]["networks"][0]["lambda_1"]
        is None
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rho": 0.0}, "--rho 0: use a number above 0"),
        ({"adaptive_rho": float("nan")}, "--adaptive-rho nan"),
        ({"steps": 0}, "--steps 0: use an integer of at least 1"),
        ({"lanczos_steps": 4}, "--lanczos-steps 4: use an integer of at least 5"),
        ({"seeds": 0}, "--seeds 0"),
    ],
)
def test_options_out_of_range(run_dir, change, message):
    with pytest.raises(UserError, match=message):
        analyze.run(Analyze(run_dir, **change))


def test_a_directory_without_a_run(tmp_path):
    with pytest.raises(UserError, match=r"holds no results\.json and params\.npz"):
        analyze.run(Analyze(tmp_path))


def test_data_that_changed(run_dir, tmp_path, archive):
    found = json.loads((run_dir / "results.json").read_text())
    found["dataset"]["sha256"] = "0"
    (tmp_path / "results.json").write_text(json.dumps(found))
    (tmp_path / "params.npz").write_bytes((run_dir / "params.npz").read_bytes())
    with pytest.raises(UserError, match="contents have changed"):
        analyze.run(Analyze(tmp_path))


def test_batch_norm_is_measured_with_its_running_statistics(tmp_path, monkeypatch):
    """The loss alone: to compile the Hessian of a convolutional network takes minutes here."""

    def measure(loss, params, options):
        return dict.fromkeys(analyze.MEASURES, float(loss(jax.tree.map(jnp.asarray, params))))

    monkeypatch.setattr(analyze, "_measure", measure)
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
    assert of(found, "sgd", 0)["sharpness"] == pytest.approx(float(losses.mean()), rel=1e-5)
    assert (out / "planes.png").is_file()
