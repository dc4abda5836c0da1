"""``analyze``: measures of a run's networks, against the library's own and dense ones."""

import contextlib
import csv
import io
import json
import math
import re
import shutil
import zipfile

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
from sam_optax.experiments.data.dataset import load
from sam_optax.experiments.data.labels import corrupt
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.finished import open_runs
from sam_optax.experiments.networks.registry import build
from sam_optax.experiments.reporting.results import load_params
from sam_optax.experiments.reporting.snapshots import Snapshots

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
    dataset = load(f"npz:{archive}")
    model = build("mlp", dataset.shape, dataset.classes, jnp.float32)
    y = corrupt(dataset.train.y, noise, 3, np.random.default_rng([seed, 0]))
    variables = load_params(run_dir / file)[name][seed]

    def loss(params, examples=...):
        logits = model.apply({"params": params}, dataset.train.x[examples], train=False)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y[examples]).mean()

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
        sharpness = {epoch: of(found, name, 0, epoch)["sharpness"] for epoch in (2, 4, 5)}
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


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (None, f"params.npz: has no array {NAME};"),
        (np.zeros((7, 3), np.float32), f"params.npz: {NAME} is float32[7, 3], but float32["),
        (np.array("text"), f"params.npz: {NAME} is <U4[], but float32["),
        (b"no array", "params.npz: is damaged (the magic string is not correct"),
    ],
)
def test_params_that_are_not_the_run_s(array, message, copy, capsys):
    with zipfile.ZipFile(copy / "params.npz") as old:
        members = {name: old.read(name) for name in old.namelist()}
    del members[f"{NAME}.npy"]
    if array is not None:
        file = io.BytesIO()
        file.write(array) if isinstance(array, bytes) else np.save(file, array)
        members[f"{NAME}.npy"] = file.getvalue()
    with zipfile.ZipFile(copy / "params.npz", "w") as new:
        new.comment = old.comment
        for name, content in members.items():
            new.writestr(name, content)
    assert main(["analyze", str(copy)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("name", ["params.npz", "params_epoch_2.npz"])
@pytest.mark.parametrize("content", [b"", b"{}", b"PK\3\4"])
def test_damaged_params(content, name, copy, capsys):
    (copy / name).write_bytes(content)
    assert main(["analyze", str(copy)]) == 2
    assert f"{name}: is damaged" in capsys.readouterr().err


FIELDS = {
    "settings": "settings",
    "settings dtype": "dtype",
    "settings lr": "lr",
    "dataset name": "name",
    "dataset sha256": "sha256",
    "seeds": "seeds",
    "methods 0 method": "method",
    "methods 0 seeds 0 curves test_accuracy": "test_accuracy",
}


@pytest.mark.parametrize(("place", "field"), FIELDS.items())
def test_results_without_a_field(place, field, copy, capsys):
    found = json.loads((copy / "results.json").read_text())
    *outer, last = place.split()
    inner = found
    for key in outer:
        inner = inner[int(key) if key.isdigit() else key]
    del inner[last]
    (copy / "results.json").write_text(json.dumps(found))
    assert main(["analyze", str(copy)]) == 2
    error = capsys.readouterr().err
    assert re.search(rf"results.json: describes no run of this version \(.*'{field}'", error)
    assert len(error.splitlines()) == 1


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
    of_examples, params = loss_and_params(archive, run_dir, "sam", 0)
    order = np.random.default_rng(0).permutation(40)
    loss = analysis.DatasetLoss.from_examples(of_examples, jnp.asarray(order), 40)
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
        command.run(command.Analyze((run_dir,), **change))


def test_runs_that_cannot_be_measured_together(run_dir, kept, tmp_path, capsys):
    for arguments, message in {
        (): "RUN_DIR: none is given",
        (tmp_path,): "holds no results.json and params.npz",
        (run_dir, kept): "RUN_DIR: there are several; give --out DIR for the files",
        (run_dir, run_dir, "--out", tmp_path): f"RUN_DIR {run_dir}: is given twice; give each run",
    }.items():
        assert main(["analyze", *map(str, arguments)]) == 2
        assert message in capsys.readouterr().err


def test_data_that_changed(copy):
    text = (copy / "results.json").read_text()
    (copy / "results.json").write_text(re.sub('"sha256": "[0-9a-f]+"', '"sha256": "0"', text))
    with pytest.raises(UserError, match="contents have changed"):
        open_runs([copy])


def test_batch_norm_is_measured_with_its_running_statistics(tmp_path, monkeypatch):
    """The loss alone: to compile the Hessian of a convolutional network takes minutes here."""

    def measure(network, options):
        variables = network.load()
        value = float(network.loss(variables)(variables["params"]))
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
    ((network,),) = (opened.networks for opened in open_runs([out]))
    # For stability: as in training, but each example once.
    loss = network.loss(variables, group=9, train=True)
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
