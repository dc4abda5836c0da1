"""Networks, data, losses and metrics of users: from files and from Python."""

import copy
import re
import sys
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sam_optax.experiments import Result, compare, named, open_run
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.networks import own
from sam_optax.experiments.reporting.archive import load_params

pytestmark = pytest.mark.usefixtures("compile_fast")


NET = """
import flax.linen as nn
class Net(nn.Module):
    classes: int = 3
    @nn.compact
    def __call__(self, x{argument}):
        x = nn.Dropout(0.5, deterministic={off})(x)
        return nn.Dense(self.classes)(x.reshape(len(x), -1))
"""
PLAIN = NET.format(argument="", off=True)


class Nnx(nnx.Module):
    """BatchNorm and dropout before a linear layer, for vectors of 6 features."""

    def __init__(self, classes, *, rngs, rate=0.5):
        self.norm = nnx.BatchNorm(6, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.head = nnx.Linear(6, classes, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(self.norm(x)))


class Linen(nn.Module):
    """The same in Linen."""

    classes: int

    @nn.compact
    def __call__(self, x, *, training):
        x = nn.BatchNorm(not training, momentum=0.9)(x)
        return nn.Dense(self.classes)(nn.Dropout(0.5, deterministic=not training)(x))


quick = partial(compare, methods=["sgd", "sam"], epochs=1, batch_size=20, seeds=1, weight_decay=0.0)


def outputs(model, key, train):
    x = jax.random.normal(jax.random.key(0), (4, 6))
    variables = model.init(jax.random.key(0), x, train=False)
    rest = [name for name in variables if name != "params"]
    rngs = {"dropout": jax.random.key(key)}
    return np.asarray(model.apply(variables, x, train=train, mutable=rest, rngs=rngs)[0])


def drops(model):
    """Whether it draws in training; in evaluation it must not."""
    np.testing.assert_array_equal(outputs(model, 0, False), outputs(model, 1, False))
    np.testing.assert_array_equal(outputs(model, 0, True), outputs(model, 0, True))
    return bool(np.any(outputs(model, 0, True) != outputs(model, 1, True)))


MODES = {"train": "not train", "training=False": "not training", "deterministic": "deterministic"}


@pytest.mark.parametrize(("argument", "off"), [*MODES.items(), ("", "True")])
def test_the_argument_of_a_linen_call_that_tells_training(argument, off, tmp_path):
    file = tmp_path / "net.py"
    file.write_text(NET.format(argument=argument and f", {argument}", off=off))
    model, _ = own.adapted(named.find(f"{file}:Net"), "net", 5)
    assert outputs(model, 0, True).shape == (4, 5)
    assert drops(model) == bool(argument)


def test_every_form_of_a_network():
    forms = {
        "class of Linen": Linen,
        "module of Linen": Linen(3),
        "function of Linen": lambda classes: Linen(classes),
        "class of NNX": Nnx,
        "function of NNX": lambda rngs, classes: Nnx(classes, rngs=rngs, rate=0.5),
    }
    for name, form in forms.items():
        model, _ = own.adapted(form, name, 3)
        own.check(model, name, jnp.ones((1, 6)), (3,))
        assert drops(model), name
    stateless, _ = own.adapted(lambda rngs: nnx.Linear(6, 3, rngs=rngs), "stateless", 3)
    own.check(stateless, "stateless", jnp.ones((1, 6)), (3,))
    assert not drops(stateless)


def test_every_stream_of_an_nnx_module_draws_its_own_numbers():
    class Twice(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(1, 1, rngs=rngs)
            self.first, self.second = (nnx.Dropout(0.5, rngs=nnx.Rngs(i)) for i in range(2))

        def __call__(self, x):
            return self.first(jnp.ones(1000)) * self.second(jnp.ones(1000))

    model, _ = own.adapted(Twice, "twice", 2)
    variables = model.init(jax.random.key(0), jnp.ones((1, 1)), train=False)
    streams = {"dropout": jax.random.key(1)}
    kept = model.apply(variables, jnp.ones((1, 1)), train=True, rngs=streams) > 0
    assert 0.2 < jnp.mean(kept) < 0.3  # one mask for both would keep a half


@pytest.mark.parametrize("network", [Linen, Nnx], ids=["linen", "nnx"])
@pytest.mark.slow
def test_both_passes_draw_alike_and_statistics_advance_once(network, data):
    """With ρ = 0 SAM is SGD, to the last bit; after a step, statistics are of one batch."""
    options = {"sam": {"rho": 0.0}, "batch_size": 40, "momentum": 0.0}
    found = quick(network, **data, **options).params
    sgd, sam = found["sgd"][0], found["sam"][0]
    jax.tree.map(np.testing.assert_array_equal, sgd, sam)
    paths = jax.tree.leaves_with_path(sam)
    (mean,) = (leaf for path, leaf in paths if "mean" in jax.tree_util.keystr(path))
    np.testing.assert_allclose(mean, 0.1 * data["train"][0].mean(0), rtol=1e-4)
    moved = quick(network, **data, **options | {"sam": {"rho": 0.1}}).params["sam"][0]
    assert any(jax.tree.leaves(jax.tree.map(lambda a, b: bool(np.any(a != b)), sam, moved)))


class Masked(nn.Module):
    """The gradient of a dropped weight is 0, so that a step shows its mask."""

    @nn.compact
    def __call__(self, x, *, train):
        w = self.param("w", nn.initializers.ones, (64,))
        return nn.Dropout(0.5, deterministic=not train)(w).sum() + x


def test_dropout_is_the_same_in_both_passes_and_another_in_the_next_step():
    x = np.zeros((8, 1), np.float32)
    data = {"train": (x, x[:, 0]), "test": (x, x[:, 0])}
    options = {"batch_size": 8, "momentum": 0.0, "lr": 1e-3, "schedule": "constant"}
    options |= {"loss": SQUARE, "sam": {"rho": 0.1}, **data}
    first = quick(Masked, **options).params
    second = quick(Masked, **options, methods=["sam"], epochs=2).params
    moved = lambda found, method: found[method][0]["params"]["w"] != 1
    assert 0 < moved(first, "sgd").sum() < 64
    np.testing.assert_array_equal(moved(first, "sam"), moved(first, "sgd"))
    assert np.any(moved(second, "sam") != moved(first, "sam"))


def test_from_a_file_with_neighbours_and_from_a_package(tmp_path, monkeypatch, data):
    (tmp_path / "widths_of_mine.py").write_text("WIDTH = 7\n")
    body = "from widths_of_mine import WIDTH\nsmall = lambda classes: Net(WIDTH)\n"
    (tmp_path / "net_of_mine.py").write_text(PLAIN + body)
    package = tmp_path / "package_of_mine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "nets.py").write_text(PLAIN)
    monkeypatch.chdir(tmp_path)
    assert named.find(f"{tmp_path}/net_of_mine.py:small")(3).classes == 7
    assert "net_of_mine" not in sys.modules  # which might be the name of another
    places = ["package_of_mine.nets:Net", f"{package}/nets.py:Net"]
    assert named.sha256(places[:1]) == named.sha256(places[1:])
    assert quick("package_of_mine.nets:Net", **data).results["parameters"] == 7 * 3
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "<stdin>", raising=False)
    assert named.sha256(["mlp", "sys:path", "__main__:main"]) is None  # of no file


MODULE = "(nn.Module):\n @nn.compact\n def __call__(self, x"
BODIES = {
    "": "has no net",
    "net = 3": "is of type int",
    "import no_such_module": "fails with ModuleNotFoundError",
    "net = nnx.Linear(6, 3, rngs=nnx.Rngs(0))": "one initialization",
    "def net(classes): return 3": "returns .* int",
    "def net(rngs): return 3": "returns .* int",
    "def net(classes): raise KeyError('a')": "fails with KeyError",
    "def net(rngs): raise KeyError('a')": "fails with KeyError",
    "def net(classes): raise ValueError('a\\nb')": "fails with ValueError: a;",
    "def net(classes): return nn.Dense(classes + 1)": r"need \(2, 3\)",
    "def net(): return nn.Conv(3, (3, 3))": "of shape 6",
    f"class net{MODULE}, train, deterministic): return x": "train and deterministic",
    f"class net{MODULE}): return x[:, :3]": "no params",
    f"class net{MODULE}): return nn.Dense(3)(x), x": "returns .* tuple",
    f"class net{MODULE}): return nn.Dense(3)(x.mean(0)[None])": r"shape \(1, 3\) for two",
    f"class net{MODULE}): self.sow('kept', 'x', 1.0); return nn.Dense(3)(x)": "its kept; keep",
}


@pytest.mark.parametrize(("body", "reason"), BODIES.items(), ids=range(len(BODIES)))
def test_what_cannot_be_trained_is_refused_in_a_line(body, reason, tmp_path, data):
    file = tmp_path / "refused.py"
    file.write_text(f"import flax.linen as nn\nfrom flax import nnx\n{body}\n")
    with pytest.raises(UserError) as error:
        quick(f"{file}:net", **data)
    assert re.fullmatch(f"--model {file}.*{reason}.*", str(error.value))


FEW = nn.Sequential([lambda x: x.reshape(min(len(x), 2), 6), nn.Dense(3)])  # no larger batch
MASKED = np.ma.masked_array(np.eye(6), np.eye(6))
SQUARE = lambda outputs, y: (outputs[:, 0] - y) ** 2
REFUSED = {
    "no module": ({"model": "no_such_package:Net"}, "--model no_such_package.*ModuleNotFoundError"),
    "no variables": ({"model": (Linen, 3)}, "--model Linen: its variables are of type int; give n"),
    "unknown option": ({"epoch": 3}, "epoch: .*did you mean epochs"),
    "no group": ({"sam": 0.1}, "sam: got 0.1"),
    "no hyperparameter": ({"sam": {"roh": 1}}, "sam.roh: unknown option; did you mean sam.rho"),
    "test without train": ({"train": None}, "test: give train"),
    "two data sets": ({"dataset": "digits"}, "dataset: train is given"),
    "no direction": ({"metric": SQUARE}, "higher_is_better"),
    "direction alone": ({"higher_is_better": True}, "higher_is_better: give True or"),
    "failing network": ({"model": FEW}, "--model: the network fails with TypeError: cannot resh"),
    "failing loss": ({"loss": lambda outputs, y: y.nothing}, "^loss: fails with AttributeError: "),
    "loss of a batch": (
        {"loss": lambda outputs, y: jnp.mean(outputs)},
        r"loss: returns shape \(\)",
    ),
    "outputs against all labels": (
        {"model": nn.Dense(1), "loss": lambda outputs, y: jnp.mean((outputs - y) ** 2, axis=-1)},
        r"loss: takes 20 outputs \(n, 1\) and 21 labels \(n,\), so it does not pair them; give y",
    ),
    "complex metric": (
        {"metric": lambda outputs, y: outputs[:, 0] * 1j, "higher_is_better": True},
        "metric: .*let it return one real number",
    ),
    "no truth value": ({"metric": SQUARE, "higher_is_better": "no"}, "higher_is_better: give Tr"),
    "masked values": ({"train": (MASKED, np.arange(6))}, "train has masked values; leave out or"),
    "ragged lists": ({"train": ([[1, 2], [3]], [0, 1])}, "train: fails with ValueError: setting"),
    "noise of targets": ({"loss": SQUARE, "label_noise": 0.4}, "--label-noise 0.4"),
    "noise of the command": (
        {"train": None, "test": None, "dataset": "digits", "model": "mlp", "loss": SQUARE},
        r"--label-noise 0.4: is for cross entropy, not a loss of yours; give 0.0.",
    ),
    "failing callback": ({"on_epoch": lambda epoch: 0}, "^on_epoch: fails with TypeError: "),
    "no integer": ({"epochs": 3.0}, r"--epochs 3: use an integer \(int\) of at l"),
    "no directory": ({"out": ""}, "--out: is empty"),
    "dry run": ({"dry_run": True}, "dry_run"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_calls_that_are_refused(case, data):
    changes, reason = case
    with pytest.raises(UserError, match=f"^{reason}"):
        quick(**{"model": Linen, **data, **changes})


def test_what_a_call_returns_and_writes(data, tmp_path, capsys):
    out = tmp_path / "run"
    found = quick(Nnx, **data, seeds=2, out=out)
    assert isinstance(found, Result)
    names = [method["name"] for method in found.results["methods"]]
    assert names == list(found.params) == ["sgd", "sam"]
    assert [sorted(of) for of in found.params.values()] == 2 * [[0, 1]]
    model, _ = own.adapted(Nnx, "net", 3)
    logits = model.apply(found.params["sgd"][0], data["test"][0], train=False)
    right = float(np.mean(np.argmax(logits, -1) == data["test"][1]))
    assert found.results["methods"][0]["seeds"][0]["test_accuracy"] == pytest.approx(right)
    assert all(image.startswith(b"\x89PNG") for image in found.figures.values())
    assert "sgd" not in capsys.readouterr().out
    found.print()
    assert "sam" in capsys.readouterr().out
    assert "over SGD" in repr(found)
    assert re.search("<pre.*>.*sam", found._repr_mimebundle_((), ())["text/html"], re.DOTALL)
    written = {path.name for path in out.iterdir()}
    assert {"results.json", "params.npz", "report.html"} <= written
    stored = load_params(out / "params.npz")
    jax.tree.map(np.testing.assert_array_equal, stored, found.params)


def test_a_callback_gets_the_scores_and_params_of_every_epoch(data):
    """Of the methods that have trained it: one with another radius has diverged at once."""
    calls = {}

    def keep(epoch, scores, params):
        calls[epoch] = copy.deepcopy(scores), params()
        for of in scores.values():
            of.clear()  # the caller's own copies

    found = quick(Nnx, **data, seeds=2, epochs=3, on_epoch=keep, sam={"rho": [0.1, 1e30]})
    assert [*calls] == [1, 2, 3]
    methods = {method["name"]: method["seeds"] for method in found.results["methods"]}
    for epoch, (scores, params) in calls.items():
        assert [*scores] == [*params] == [*methods][: 3 if epoch == 1 else 2]
        for name in [*scores][:2]:
            for curve in ("train_loss", "test_accuracy"):
                curves = [seed["curves"][curve][epoch - 1] for seed in methods[name]]
                np.testing.assert_allclose(scores[name][curve], curves, 1e-6)
    jax.tree.map(np.testing.assert_array_equal, params, dict([*found.params.items()][:2]))


@pytest.mark.parametrize("name", ["distance", "accuracy", "cost"])
def test_a_loss_and_a_metric(data, name):
    """A regression: the mean over the test examples, of the last params, whatever its name."""

    def metric(outputs, y):
        return jnp.abs(outputs[:, 0] - y)

    metric.__name__ = name
    regression = {part: (x, x[:, 0]) for part, (x, _) in data.items()}
    net = nn.Dense(1)
    options = {"loss": SQUARE, "metric": metric, "higher_is_better": False, "lr": 0.01}
    found = quick(net, **regression, epochs=20, **options)
    x, y = regression["test"]
    expected = np.mean(metric(net.apply(found.params["sgd"][0], x), y))
    assert expected < np.mean(np.abs(y))
    (seed,) = found.results["methods"][0]["seeds"]
    assert seed[found.results["metric"]["key"]] == pytest.approx(float(expected), rel=1e-5)
    assert re.search(rf"^sgd +{expected:.4f} ", repr(found), re.M)  # not in percent
    assert f"test {name}:" in repr(found)
    assert "nats" not in repr(found)  # the loss is another


@pytest.mark.parametrize("tune", [False, True])
def test_a_metric_that_is_not_a_number_costs_no_results(tune, data, tmp_path):
    """Of one method: there is no difference to it, and of --tune every epoch is as good."""

    def metric(outputs, y):
        return jnp.log(-jnp.exp(outputs[:, 0]))

    options = {"tune": True, "trials": 2} if tune else {}
    more = {"metric": metric, "higher_is_better": True, "out": tmp_path / "run", "seeds": 2}
    found = quick(nn.Dense(3), **data, **more, **options)
    for method in found.results["methods"]:
        assert method["summary"]["test_metric"]["mean"] is None
        (difference,) = method["differences"].values()
        assert difference["test_metric"]["mean"] is None
        assert all(of["broken_down"] for of in method.get("tune", {}).get("trials", ()))
    assert (tmp_path / "run" / "report.html").exists()
    assert ("what --tune searches is chosen on held-out" in repr(found)) == tune


@pytest.mark.slow
def test_what_was_given_from_python_is_not_taken_for_what_has_its_name(archive, tmp_path, capsys):
    """Neither to go on with it nor to measure it."""
    out, options = tmp_path / "run", {"dataset": f"npz:{archive}"}
    loss = lambda outputs, y: -jax.nn.log_softmax(outputs)[jnp.arange(len(y)), y]
    found = quick("mlp", **options, loss=loss, out=out).results
    assert found["settings"]["from_python"]["value"] == ["loss"]
    assert quick("mlp", **options, loss=loss, out=out, resume=True).results["seeds"] == [0]
    with pytest.raises(UserError, match=r"--resume: .* --from-python \['loss'\] \(now None\)"):
        quick("mlp", **options, out=out, resume=True)
    scored = {"metric": SQUARE, "higher_is_better": False}
    with pytest.raises(UserError, match=r"settings: --metric test_loss \(now test_metric\)\. "):
        quick("mlp", **options, **scored, loss=loss, out=out, resume=True)
    with pytest.raises(UserError, match=f"^{out}: has its loss from Python, in no file of the run"):
        open_run(out)


@pytest.mark.slow
def test_a_metric_from_python_does_not_hinder_measuring(archive, tmp_path):
    out, half = tmp_path / "run", lambda outputs, y: jnp.full(len(y), 0.5)
    quick("mlp", dataset=f"npz:{archive}", metric=half, higher_is_better=True, out=out)
    assert [network.score for network in open_run(out).networks] == [0.5, 0.5]
