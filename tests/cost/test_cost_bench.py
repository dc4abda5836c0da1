"""The benchmark: its figures on a tiny network, its file and its errors."""

import dataclasses
import json

import jax.numpy as jnp
import pytest
from helpers import init_mlp, mlp_loss

from sam_optax.experiments.bench import command as bench
from sam_optax.experiments.bench import report
from sam_optax.experiments.bench.measure import CompiledCost
from sam_optax.experiments.bench.models import Model, Problem
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.reporting import output

pytestmark = pytest.mark.slow


def tiny(batch_size):
    batch = jnp.ones((batch_size, 3)), jnp.ones((batch_size, 2))
    return Problem(init_mlp(), lambda params, batch: mlp_loss(params, *batch), batch)


@pytest.fixture
def tiny_model(monkeypatch):
    monkeypatch.setitem(bench.MODELS, "tiny", Model(tiny, 5))
    return bench.Bench(models=("tiny",), methods=("sam",), rounds=2, builds=1)


def test_measures_prints_and_writes(tiny_model, tmp_path, capsys):
    out = tmp_path / "bench.json"
    bench.run(dataclasses.replace(tiny_model, out=out))
    content = json.loads(out.read_text())
    assert content["environment"]["jax"]
    result = content["models"]["tiny"]
    assert (result["batch_size"], result["parameters"]) == (5, 26)
    names = ["sgd", "sgd by hand", "sam by hand", "optax.contrib.sam", "sam"]
    assert sorted(result["steps"]) == sorted(names)
    for step in result["steps"].values():
        assert len(step["seconds"]) == 2
        assert min(*step["seconds"], step["trace_seconds"], step["compile_seconds"]) > 0
        assert step["ratios"]["sam by hand"]["wall"] > 0
    sam, base = result["steps"]["sam"], result["steps"]["sgd"]
    assert sam["cost"]["flops"] > 1.5 * base["cost"]["flops"]
    assert (base["state_bytes"], sam["state_bytes"]) == (26 * 4, 26 * 4 + 8)
    assert list(tmp_path.iterdir()) == [out]
    printed = capsys.readouterr().out
    assert all(name in printed for name in names)


def test_steps_of_many_leaves_are_built_and_not_run(tmp_path, capsys):
    out = tmp_path / "bench.json"
    bench.run(bench.Bench(methods=("sam", "info"), leaves=4, builds=1, out=out))
    (model,) = json.loads(out.read_text())["models"].values()
    assert model["parameters"] == 2 * (32 * 32 + 32)
    assert all(step["seconds"] == [] for step in model["steps"].values())
    assert model["steps"]["info"]["ratios"]["sam by hand"]["compile_seconds"] > 0
    printed = capsys.readouterr().out
    assert "4 leaves" in printed
    assert "ms/step" not in printed


@pytest.mark.parametrize("leaves", [0, 3])
def test_a_number_of_leaves_that_is_none(leaves):
    message = f"--leaves must be an even number of at least 2, got {leaves}"
    with pytest.raises(UserError, match=message):
        bench.run(bench.Bench(leaves=leaves))


def test_ratios_are_taken_within_rounds():
    """A machine that is ten times slower in one round changes nothing."""

    def step(seconds):
        cost = CompiledCost(1.0, 1.0, 0, 1)._asdict()
        times = {"trace_seconds": 1.0, "compile_seconds": 1.0, "seconds": seconds}
        return {"reference": "b", "cost": cost, **times}

    a, b = step([2.0, 20.0, 4.0]), step([1.0, 10.0, 2.0])
    assert report.wall_ratio(a, b) == [2.0, 2.0, 2.0]
    steps = report.with_ratios({"sgd": b, "sam by hand": b, "b": b, "a": a})
    ratios = steps["a"]["ratios"]["b"]
    assert ratios["wall"] == 2.0
    assert ratios["temp_bytes"] is None  # 0 / 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"models": ("mpl",)}, "--models: 'mpl' is not one of mlp, .*vit"),
        ({"methods": ("adam",)}, "--methods: 'adam' is not one of sam, asam"),
        ({"models": ()}, "--models needs at least one of"),
        ({"rounds": 0}, "--rounds must be at least 1, got 0"),
        ({"builds": -1}, "--builds must be at least 1, got -1"),
        ({"batch_size": 0}, "--batch-size must be at least 1, got 0"),
    ],
)
def test_wrong_options_are_errors_of_the_user(change, message):
    with pytest.raises(UserError, match=message):
        bench.run(bench.Bench(**change))


def test_unusable_files_are_found_before_measuring(tmp_path):
    for out in (tmp_path / "none" / "bench.json", tmp_path):
        with pytest.raises(UserError, match="--out"):
            bench.run(bench.Bench(out=out))


def test_a_failed_write_leaves_the_old_file(tmp_path):
    out = tmp_path / "bench.json"
    output.write_json(out, {"old": 1})
    with pytest.raises(TypeError):
        output.write_json(out, {"new": object()})
    assert json.loads(out.read_text()) == {"old": 1}
    assert list(tmp_path.iterdir()) == [out]
