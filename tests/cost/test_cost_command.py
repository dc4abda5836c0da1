"""The command: its counts on tiny networks, its files and its errors."""

import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest

from sam_optax.__main__ import main
from sam_optax.experiments.cost import command, measure

slow = pytest.mark.slow
MORE = Path(__file__).parents[2] / "notebooks" / "methods.py"
NETWORK = """
import flax.linen as nn

class Net(nn.Module):
    classes: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.classes)(nn.Conv(4, (3, 3))(x).mean((1, 2)))
"""


@pytest.fixture(autouse=True)
def _settings_of_the_process_are_kept():
    jax.devices()  # those of the tests; they are counted once, at the first use
    before, cached = dict(os.environ), jax.config.jax_enable_compilation_cache
    yield
    os.environ.clear()
    os.environ.update(before)
    jax.config.update("jax_enable_compilation_cache", cached)


def cost(tmp_path, *arguments):
    out = tmp_path / "costs"
    assert main(["cost", *arguments, "--out", str(out)]) == 0
    assert (out / command.FIGURE).read_bytes().startswith(b"\x89PNG")
    return json.loads((out / "cost.json").read_text())["models"]


def test_its_mark_gives_compare_no_right_to_files(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "_measured", lambda options: {"models": {}})
    monkeypatch.setattr(command, "draw", lambda models: b"")
    (tmp_path / "results.json").write_text("mine")
    assert [main([name, "--out", str(tmp_path)]) for name in ("cost", "compare")] == [0, 2]
    assert "results.json was not written by this command" in capsys.readouterr().err


@slow
def test_measures_prints_and_writes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "ROUNDS", 2)
    arguments = ["--models", "mlp:2x8", "--methods", "sam", "--time"]
    (model,) = cost(tmp_path, *arguments, "--batch-size", "4").values()
    assert model["parameters"] == 2 * (8 * 8 + 8)
    names = ["base optimizer", "sam by hand", "sam"]
    assert list(model["steps"]) == names
    for step in model["steps"].values():
        assert len(step["seconds"]) == 2
        assert min(step["seconds"]) > 0 < step["compile seconds"]
    sam, base = model["steps"]["sam"], model["steps"]["base optimizer"]
    assert sam["flops"] > 1.5 * base["flops"]
    assert (base["gradients"], sam["gradients"]) == (1, 2)
    assert (base["state"], sam["state"]) == (4 * 144, 4 * 144 + 8)
    printed = capsys.readouterr().out
    assert all(name in printed for name in names)
    assert "…" not in printed


@slow
def test_a_step_of_sam_sends_what_two_gradients_are(tmp_path):
    arguments = ["--target", "cpu:2", "--models", "mlp:4x64", "--methods", "sam", "fsam"]
    (model,) = cost(tmp_path, *arguments, "sync_perturbation", "--per-device").values()
    gradient = pytest.approx(4 * 4 * (64 * 64 + 64), rel=0.01)
    assert model["steps"]["base optimizer"]["all-reduce bytes"] == gradient
    assert model["steps"]["sam"]["all-reduce bytes"] == gradient
    for name in ("fsam", "sync_perturbation"):  # F-SAM's average sees the mean gradient
        ratio = command.ratio(model["steps"][name], model["steps"]["base optimizer"], "bytes sent")
        assert ratio == pytest.approx(2, rel=0.01)
    (model,) = cost(tmp_path, *arguments, "--params", "fsdp").values()
    sam, base = model["steps"]["sam"], model["steps"]["base optimizer"]
    assert sam["all-gather bytes"] == pytest.approx(2 * base["all-gather bytes"], rel=0.1)


@slow
@pytest.mark.parametrize("name", ["own", "tiny"])
def test_networks_of_the_registry_and_ones_own_on_a_mesh(tmp_path, name):
    (tmp_path / "net.py").write_text(NETWORK)
    arguments = ["--target", "cpu:4", "--mesh", "data=2", "model=2", "--params", "fsdp"]
    arguments += ["--batch-size", "4", "--optimizer", "adam", "--methods", "momentum"]
    arguments += [f"{MORE}:delta_sam"]
    of = (
        [f"{MORE.with_name('networks.py')}:tiny"]
        if name == "tiny"
        else [f"{tmp_path}/net.py:Net", "--shape", "8", "8", "1"]
    )
    (model,) = cost(tmp_path, *arguments, "--models", *of).values()
    assert (model["parameters"] == 3 * 3 * 4 + 4 + 4 * 10 + 10) == (name == "own")
    assert model["steps"]["momentum"]["gradients"] == 1
    assert model["steps"][f"{MORE}:delta_sam"]["gradients"] == 3
    # Each device keeps a quarter of Adam's two averages, but for what does not divide.
    most = 8 if name == "own" else 3
    assert (
        2 * model["parameters"] < model["steps"]["momentum"]["state"] < most * model["parameters"]
    )


def test_examples_that_a_network_does_not_take(tmp_path, capsys):
    (tmp_path / "net.py").write_text(NETWORK)
    assert main(["cost", "--models", f"{tmp_path}/net.py:Net", "--shape", "8"]) == 2
    message = capsys.readouterr().err
    assert "net.py:Net: does not take examples of shape 8 (float32)" in message
    assert "--shape gives the shape of an example." in message


def test_results_of_several_arrays_are_added():
    program = """
  %a = f32[256,1024]{1,0:T(8,128)} all-reduce(%x), replica_groups={}
  %b = (f32[1024]{0}, /*index=1*/bf16[3,1024]{1,0}) all-reduce-start(%x, %y)
  %c = (f32[1024]{0}, /*index=1*/bf16[3,1024]{1,0}) all-reduce-done(%b)
"""
    found = measure.collectives(program)
    assert (found["all-reduce"], found["all-reduce bytes"]) == (2, 256 * 4096 + 4096 + 3 * 2048)
    assert (found["all-gather"], found["bytes sent"]) == (0, found["all-reduce bytes"])


def test_ratios_are_taken_within_rounds():
    """A machine that is ten times slower in one round changes nothing."""
    ours = {"temporaries": 0, "seconds": [2.0, 20.0, 4.0]}
    base = {"temporaries": 0, "seconds": [1.0, 10.0, 2.0]}
    assert command.ratio(ours, base, "seconds") == 2.0
    assert np.isnan(command.ratio(ours, base, "temporaries"))  # 0 / 0


def test_a_file_of_another_hand_is_not_replaced(tmp_path, capsys):
    (tmp_path / "cost.json").write_text("mine")
    assert main(["cost", "--out", str(tmp_path)]) == 2
    assert "cost.json was not written by this command" in capsys.readouterr().err


WRONG = [
    (["--models"], "--models: no value is given"),
    (["--methods", "adam"], "--methods adam: unknown; did you mean"),
    (["--shape", "0"], "--shape 0: use an integer (int) of at least 1"),
    (["--methods", "sync_perturbation"], "--methods sync_perturbation: use it with --per-d"),
    (["--target", "cpu:0"], "--target cpu:0: use tpu:v5e:2x2 or cpu:8, say"),
    (["--target", "v5e"], "--target v5e: use tpu:v5e:2x2"),
    (["--mesh", "data"], "--mesh data: use NAME=SIZE"),
    (["--time", "--target", "cpu:2"], "--time: not with --target cpu:2"),
    (["--per-device", "--params", "fsdp"], "--per-device: use it with --params replicated"),
    (["--out", __file__], f"--out {__file__}: cannot be written to"),
]
UNFIT = [
    (["--models", "mpl"], "--model mpl: unknown; did you mean mlp"),
    (["--models", "flax.linen:Embed"], "--model flax.linen:Embed: fails with"),
    (["--methods", f"{MORE}:sam_full"], "sam_full: its cost is that of the training set"),
    (["--target", "cpu:99"], "--target cpu:99: JAX has started with 8; use a new process"),
    (["--target", "cpu:2", "--mesh", "data=4"], "--mesh of 4 devices: there are 2"),
    (["--target", "cpu:2", "--batch-size", "3"], "--batch-size 3: use a multiple of 2"),
    (["--target", "cpu:2", "--mesh", "model=2"], "--mesh model=2: name an axis data, for"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), [*WRONG, *(pytest.param(*of, marks=slow) for of in UNFIT)]
)
def test_wrong_options_are_errors_of_the_user(arguments, message, capsys):
    assert main(["cost", *arguments]) == 2
    assert message in capsys.readouterr().err
