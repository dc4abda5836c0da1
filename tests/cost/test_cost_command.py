"""The command: its counts on tiny networks, its files and its errors."""

import json

import jax
import pytest
from more_by_hand import FRACTION

from sam_optax.__main__ import main
from sam_optax.experiments.cost import measure, problems, report, steps

MIB = 2**20
slow = pytest.mark.slow


def cost(tmp_path, *arguments):
    out = tmp_path / "cost.json"
    assert main(["cost", *arguments, "--out", str(out)]) == 0
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    return json.loads(out.read_text())["models"]


@slow
def test_measures_prints_and_writes(tmp_path, capsys):
    arguments = ["--models", "mlp:2x8", "--methods", "sam", "--time", "--rounds", "2"]
    (model,) = cost(tmp_path, *arguments, "--batch-size", "4").values()
    assert model["parameters"] == 2 * (8 * 8 + 8)
    names = ["base optimizer", "sam by hand", "optax.contrib.sam", "sam"]
    assert list(model["steps"]) == names
    for step in model["steps"].values():
        assert len(step["rounds"]) == 2
        assert min(step["rounds"]) > 0 < step["compile seconds"]
        assert step["/hand"]["seconds"] > 0
    sam, base = model["steps"]["sam"], model["steps"]["base optimizer"]
    assert sam["flops"] > 1.5 * base["flops"]
    assert (base["gradients"], sam["gradients"]) == (1, 2)
    assert (base["state"], sam["state"]) == (4 * 144, 4 * 144 + 8)
    printed = capsys.readouterr().out
    assert all(name in printed for name in names)
    assert "…" not in printed


@slow
def test_a_step_of_sam_sends_what_two_gradients_are(tmp_path):
    arguments = ["--target", "cpu:2", "--models", "mlp:4x64", "--methods", "sam"]
    (model,) = cost(tmp_path, *arguments, "--per-device").values()
    gradient = pytest.approx(4 * 4 * (64 * 64 + 64), rel=0.01)
    assert model["steps"]["base optimizer"]["all-reduce bytes"] == gradient
    assert model["steps"]["sam"]["all-reduce bytes"] == gradient
    assert model["steps"]["sam"]["gradients"] == 2
    assert model["steps"]["sam, synchronized"]["/base"]["sent"] == pytest.approx(2, rel=0.01)
    (model,) = cost(tmp_path, *arguments, "--params", "fsdp").values()
    sam, base = model["steps"]["sam"], model["steps"]["base optimizer"]
    assert sam["all-gather bytes"] == pytest.approx(2 * base["all-gather bytes"], rel=0.1)


@slow
@pytest.mark.parametrize("name", ["vit", "tiny"])
def test_networks_of_the_registry_on_a_mesh(tmp_path, name):
    arguments = ["--target", "cpu:4", "--mesh", "data=2", "model=2", "--params", "fsdp"]
    arguments += ["--batch-size", "4", "--optimizer", "adam", "--methods", "momentum"]
    (model,) = cost(tmp_path, *arguments, "--models", name).values()
    assert model["steps"]["momentum"]["gradients"] == 1
    # Each device keeps a quarter of Adam's two averages, but for what does not divide.
    assert 2 * model["parameters"] < model["steps"]["momentum"]["state"] < 3 * model["parameters"]


GRADIENTS = {"part": 1 + FRACTION, "momentum": 1, "every": 2, "low_pass": 3, "lookbehind": 3}


@pytest.mark.parametrize("method", ["sam", "rsam", "info", "skip_nonfinite", *GRADIENTS])
def test_counts_gradients(method):
    """Of a part of the batch, in a branch, in a loop."""
    problem = problems.make("mlp:2x8", 16)
    changes = {"part": {"fraction": FRACTION}, "low_pass": {"samples": 3}}.get(method, {})
    step = steps.make(steps.Row(method), measure.counted(problem.losses), **changes)
    params = jax.eval_shape(problem.init)
    traced = jax.jit(step.step).trace(params, jax.eval_shape(step.init, params), problem.batch)
    assert measure.gradients(traced.jaxpr) / 16 == GRADIENTS.get(method, 2)


def test_results_of_several_arrays_are_added():
    program = """
  %a = f32[256,1024]{1,0:T(8,128)} all-reduce(%x), replica_groups={}
  %b = (f32[1024]{0}, /*index=1*/bf16[3,1024]{1,0}) all-reduce-start(%x, %y)
  %c = (f32[1024]{0}, /*index=1*/bf16[3,1024]{1,0}) all-reduce-done(%b)
"""
    found = measure.collectives(program)
    assert (found["all-reduce"], found["all-reduce bytes"]) == (2, 256 * 4096 + 4096 + 3 * 2048)
    assert (found["all-gather"], found["sent"]) == (0, found["all-reduce bytes"])


def test_ratios_are_taken_within_rounds():
    """A machine that is ten times slower in one round changes nothing."""
    keys = dict.fromkeys(report._MEASURES, 1.0) | {"temporaries": 0.0}
    found = {
        "a": {**keys, "reference": "b", "rounds": [2.0, 20.0, 4.0]},
        "b": {**keys, "reference": "b", "rounds": [1.0, 10.0, 2.0]},
    }
    report.add_ratios(found, "b")
    assert found["a"]["/hand"]["seconds"] == 2.0
    assert found["a"]["/hand"]["quartiles"] == [2.0, 2.0]
    assert found["a"]["/base"]["temporaries"] is None  # 0 / 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "adam"], "--methods adam: unknown; did you mean"),
        (["--rounds", "0"], "--rounds 0: use an integer of at least 1"),
        (["--target", "v5e"], "--target v5e: use tpu:v5e:2x2"),
        (["--mesh", "data"], "--mesh data: use NAME=SIZE"),
        (["--time", "--target", "cpu:2"], "--time: not with --target cpu:2"),
        (["--per-device", "--params", "fsdp"], "--per-device: use it with --params replicated"),
        (["--out", "none/cost.json"], "--out"),
    ],
)
def test_wrong_options_are_errors_of_the_user(arguments, message, capsys):
    assert main(["cost", *arguments]) == 2
    assert message in capsys.readouterr().err


@slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "mpl"], "--model mpl: unknown model"),
        (["--target", "cpu:2", "--mesh", "data=4"], "--mesh of 4 devices: there are 2"),
        (["--target", "cpu:2", "--batch-size", "3"], "--batch-size 3: use a multiple of 2"),
        (["--target", "cpu:2", "--mesh", "model=2"], "--mesh model=2: name an axis data, for"),
    ],
)
def test_what_does_not_fit_the_devices(arguments, message, capsys):
    assert main(["cost", *arguments]) == 2
    assert message in capsys.readouterr().err
