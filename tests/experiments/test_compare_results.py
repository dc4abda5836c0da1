"""Summaries, JSON, CSV, arrays, table and pictures of given outcomes."""

import csv
import io
import json

import numpy as np
import pytest
from rich.console import Console

import sam_optax
from sam_optax.experiments import data, models, plots, results, table, task, training

SEEDS = (5, 6, 7)
EPOCHS = 4


def outcome(train_loss, hyperparameters):
    accuracy = np.tile(np.array([0.5, 0.75, 1.0], np.float32), (EPOCHS, 1))
    return training.Outcome(
        hyperparameters=hyperparameters,
        params={"params": {"Dense_0": {"kernel": np.arange(6.0).reshape(3, 2)}}},
        train_loss=np.tile(np.array(train_loss, np.float32), (EPOCHS, 1)),
        test_accuracy=accuracy,
        sharpness=np.array([0.1, 0.2, 0.3], np.float32),
        watched=watched(hyperparameters),
        seconds=[3.0, 1.0, 2.0],
        cost=1.875,
    )


def watched(hyperparameters):
    """As of a sharpness-aware method whose loss at the params is not evaluated."""
    if not hyperparameters:
        return {}
    numbers = set(sam_optax.StepInfo._fields) - {"loss_known"}
    known = {f: np.ones((EPOCHS, 3), np.float32) for f in numbers}
    return {**known, "loss_rise": np.full((EPOCHS, 3), np.nan, np.float32)}


@pytest.fixture(scope="module")
def outcomes():
    return {
        "sgd": outcome([1.0, 2.0, 3.0], {}),
        "sam": outcome([1.0, np.nan, 2.0], {"rho": 0.5}),
        "asam": outcome([np.inf, np.nan, np.nan], {"rho": 2.0, "eta": 0.01}),
    }


@pytest.fixture(scope="module")
def found(outcomes, archive):
    dataset = data.load(f"npz:{archive}")._replace(name="npz:small.npz")
    settings = {
        "model": "mlp",
        "epochs": EPOCHS,
        "batch_size": 10,
        "label_noise": 0.25,
        "lr": 0.1,
        "momentum": 0.9,
        "weight_decay": 0.0005,
        "sharpness_rho": 0.5,
    }
    the_task = task.Task(
        dataset, models.build("mlp", (6,), 3), SEEDS, EPOCHS, 10, 0.25, {}, sharpness_rho=0.5
    )
    return results.collect(the_task, settings, outcomes)


def test_json_is_strict_and_complete(found, archive):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    loaded = json.loads(results.to_json(found), parse_constant=refuse)
    assert (loaded["format"], loaded["format_version"]) == ("sam_optax.compare", 1)
    assert loaded["seeds"] == list(SEEDS)
    assert loaded["steps_per_epoch"] == 4
    assert loaded["dataset"] == {
        "name": "npz:small.npz",
        "train_examples": 40,
        "test_examples": 13,
        "example_shape": [6],
        "classes": 3,
        "sha256": data.load(f"npz:{archive}").sha256,
    }
    assert loaded["settings"]["label_noise"] == 0.25
    assert {"sam_optax", "jax", "optax", "flax", "numpy", "python", "device"} == set(
        loaded["versions"]
    )
    assert [method["name"] for method in loaded["methods"]] == ["sgd", "sam", "asam"]
    for method in loaded["methods"]:
        assert (method["step_cost"], method["epoch_seconds"]) == (1.875, 2.0)
        assert not set(method) & {"ascent_norm", "cosine"}  # they are of a seed's curves
        assert [run["seed"] for run in method["seeds"]] == list(SEEDS)
        for run in method["seeds"]:
            assert set(run) == {
                "seed",
                "diverged",
                "test_accuracy",
                "train_loss",
                "sharpness",
                "curves",
            }
            for key in ("test_accuracy", "train_loss"):
                assert len(run["curves"][key]) == EPOCHS
                assert run["curves"][key][-1] == run[key]
    assert loaded["methods"][1]["hyperparameters"] == {"rho": 0.5}
    curves = loaded["methods"][1]["seeds"][0]["curves"]
    assert curves["cosine"] == [1.0] * EPOCHS
    assert curves["loss_rise"] == [None] * EPOCHS
    assert "cosine" not in loaded["methods"][0]["seeds"][0]["curves"]


def test_summaries_are_means_and_sample_deviations(found):
    sgd = found["methods"][0]["summary"]
    assert sgd["test_accuracy"] == {"mean": 0.75, "std": 0.25}
    assert sgd["train_loss"] == {"mean": 2.0, "std": 1.0}
    assert sgd["sharpness"]["mean"] == pytest.approx(0.2)


def test_diverged_seeds_are_counted_and_left_out(found):
    sgd, sam, asam = found["methods"]
    assert [method["diverged"] for method in (sgd, sam, asam)] == [0, 1, 3]
    assert [run["diverged"] for run in sam["seeds"]] == [False, True, False]
    assert sam["seeds"][1]["train_loss"] is None
    assert sam["summary"]["test_accuracy"]["mean"] == 0.75
    assert sam["summary"]["train_loss"]["mean"] == 1.5
    assert asam["summary"]["test_accuracy"] == {"mean": None, "std": None}


def test_numbers_are_the_shortest_of_their_float32():
    assert results._number(np.float32(0.1)) == 0.1
    assert results._number(np.float64(0.1)) == 0.1
    assert results._number(np.float32("nan")) is None


def test_csv_has_a_line_for_every_run(found):
    rows = list(csv.DictReader(io.StringIO(results.to_csv(found).decode())))
    assert [(row["method"], row["seed"]) for row in rows] == [
        (name, str(seed)) for name in ("sgd", "sam", "asam") for seed in SEEDS
    ]
    assert rows[0] == {
        "method": "sgd",
        "seed": "5",
        "test_accuracy": "0.5",
        "train_loss": "1.0",
        "sharpness": "0.1",
        "diverged": "0",
        "step_cost": "1.875",
    }
    assert (rows[4]["train_loss"], rows[4]["diverged"]) == ("", "1")


def test_params_come_back_as_they_were(outcomes, tmp_path):
    path = tmp_path / "params.npz"
    path.write_bytes(results.params_to_npz(SEEDS, outcomes))
    with np.load(path) as archive:
        assert "sam/6/params/Dense_0/kernel" in archive.files
    loaded = results.load_params(path)
    assert list(loaded) == ["sgd", "sam", "asam"]
    assert list(loaded["sam"]) == list(SEEDS)
    np.testing.assert_array_equal(loaded["sam"][6]["params"]["Dense_0"]["kernel"], [2, 3])


def printed(found, width=80):
    file = io.StringIO()
    table.print_results(Console(file=file, width=width), found)
    return file.getvalue()


def test_one_of_a_thing_has_no_plural():
    counted = [table.counted(n, "epoch") for n in (0, 1, 2)]
    assert counted == ["0 epochs", "1 epoch", "2 epochs"]


def test_the_table_says_what_was_trained_on_and_what_came_out(found):
    text = printed(found)
    assert "npz:small.npz: 40 training and 13 test examples, 3 classes" in text
    assert "25 % of the training labels are wrong; 3 seeds" in text
    assert "mlp; 4 epochs of 4 steps with batches of 10" in text
    lines = {line.split()[0]: line for line in text.splitlines() if line}
    assert lines["sgd"].split() == ["sgd", "75.00", "±", "25.00", "2.000", "0.2000", "1.88"]
    assert "75.00 ± 35.36" in lines["sam"]
    assert "1 of 3 diverged" in text
    assert lines["asam"].split()[-4:] == ["diverged", "–", "–", "1.88"]
    assert "ρ 2, η 0.01" in lines["asam"]
    assert "ε of SAM with ρ 0.5 for all" in text
    assert max(map(len, text.splitlines())) <= 80


def test_one_seed_has_no_deviation_and_clean_labels_are_called_clean(found):
    one = json.loads(json.dumps(found))
    one["seeds"] = [5]
    one["settings"]["label_noise"] = 0.0
    for method in one["methods"]:
        method["diverged"] = 0
        method["summary"]["test_accuracy"] = {"mean": 0.9, "std": None}
    text = printed(one)
    assert "clean labels; 1 seed\n" in text
    assert "90.00" in text
    assert "±" not in text.split("test accuracy:")[0]
    assert "diverged" not in text


@pytest.mark.parametrize("draw", [plots.curves, plots.bars, plots.steps])
def test_pictures_are_drawn_even_where_runs_diverged(found, draw):
    picture = draw(found)
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000
    alone = {**found, "methods": found["methods"][2:]}
    assert draw(alone).startswith(b"\x89PNG")


def test_pictures_of_a_single_epoch_and_seed(found):
    one = json.loads(json.dumps(found))
    one["seeds"] = [5]
    for method in one["methods"]:
        method["seeds"] = method["seeds"][:1]
        for run in method["seeds"]:
            run["curves"] = {key: values[:1] for key, values in run["curves"].items()}
    for draw in (plots.curves, plots.bars):
        assert draw(one).startswith(b"\x89PNG")
