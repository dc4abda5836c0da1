"""``compare --tune``: what it tries, what it chooses, on which examples, and what it leaves."""

import dataclasses
import itertools
import json
import re
import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import tasks

from sam_optax.__main__ import main
from sam_optax.experiments import comparison
from sam_optax.experiments.data.dataset import from_arrays
from sam_optax.experiments.data.examples import Examples
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.methods import registry
from sam_optax.experiments.options.options import Compare
from sam_optax.experiments.reporting import results, words
from sam_optax.experiments.training import devices
from sam_optax.experiments.training import train as training
from sam_optax.experiments.training.task import ACCURACY, Metric, noisy_labels
from sam_optax.experiments.tuning import choice, search

slow = pytest.mark.slow
pytestmark = pytest.mark.usefixtures("compile_fast")


# Which values are tried, and which is chosen.


def trial(point, accuracy, diverged=False, chance=0.2, metric=ACCURACY):
    """Of two seeds, around the given accuracy after the last of three epochs."""
    last = np.array([accuracy - 1 / 64, accuracy + 1 / 64], np.float32)
    loss = np.array([1.0, np.nan if diverged else 1.0])
    curves = {
        metric.key: np.stack([last - 0.1, last + 0.05, last]),
        "train_loss": np.stack([loss] * 3),
    }
    return choice.trial(point, {"rho": 2.0 ** point[0]}, curves, metric, chance)


def searched(accuracy, axes=2, count=17, higher=True):
    """The trials of a whole search, of an accuracy that is a function of the point."""
    trials = []
    for point in itertools.islice(choice.points(trials, axes, higher), count):
        trials.append(trial(point, accuracy(*point)))
    return trials


@pytest.mark.parametrize(("axes", "count"), [(1, 4), (1, 17), (2, 17), (3, 17), (3, 40)])
def test_every_search_has_as_many_trials_and_none_twice(axes, count):
    trials = searched(lambda *point: 0.5 - 0.01 * sum(map(abs, point)), axes, count)
    assert len({tuple(found.exponents) for found in trials}) == len(trials) == count


@pytest.mark.parametrize("peak", [(0, 0), (2, -1), (-3, 3)])
def test_the_best_point_is_found_near_and_beyond_the_coarse_ones(peak):
    trials = searched(lambda *p: 0.9 - 0.1 * sum(abs(a - b) for a, b in zip(p, peak, strict=True)))
    assert choice.ranked(trials)[0].exponents == peak
    coarse = {tuple(found.exponents) for found in trials[:9]}
    assert coarse == {(a, b) for a in (-2, 0, 2) for b in (-2, 0, 2)}


def notes(chosen):
    return search.notes({"sam": {"around": {"sam.rho": 1.0}, **chosen}})


def test_neighbours_of_a_choice_that_were_not_tried_are_told():
    assert not choice.choose(searched(lambda a, b: 0.9 - 0.1 * (abs(a) + abs(b))))["at_bound"]
    found = choice.choose(searched(lambda a: 0.5 + 0.02 * a, 1))
    (note,) = notes(found)
    assert note.startswith("sam: not all neighbours of the best values were tried.")
    assert f"(--sam.rho {found['chosen']['rho']:g})" in note


def test_of_equal_values_the_nearest_to_the_start_is_chosen():
    level = lambda a: 0.5 if a < -1 else 0.4
    assert choice.choose(searched(level, 1, 5))["chosen"] == {"rho": 0.25}
    assert choice.choose(searched(lambda a: 0.5, 1, 5))["chosen"] == {"rho": 1.0}


def test_a_lower_score_is_better_where_that_is_said():
    loss = Metric(lambda outputs, y: y, "loss", higher_is_better=False)
    trials = [trial((i,), 0.5 + 0.1 * abs(i - 1), metric=loss) for i in range(-2, 3)]
    assert choice.choose(trials, higher=False)["chosen"] == {"rho": 2.0}
    assert choice.choose(trials, higher=False)["epoch"] == 1
    assert not trial((0,), 0.1, metric=loss).broken_down  # chance is one of accuracies


def test_what_breaks_down_is_not_chosen_and_where_all_does_no_value_is_named():
    good, bad, chance = trial((0,), 0.5), trial((1,), 0.9, diverged=True), trial((0,), 0.2)
    assert [of.broken_down for of in (good, bad, chance)] == [False, True, True]
    assert not trial((0,), 0.21).broken_down
    assert choice.choose([good, bad])["chosen"] == {"rho": 1.0}
    (note,) = notes(choice.choose([bad, chance]))
    assert "breaks down at every value that --tune tries; use a smaller --lr, or more" in note


def test_the_epoch_is_the_best_of_the_mean_curve():
    assert choice.choose([trial((0,), 0.5)])["epoch"] == 2
    (skipped,) = [trial((0,), 0.5, diverged=True)]
    skipped.held_out = [[0.1, None, None]] * 2  # what diverged is not trained on
    assert choice.choose([skipped])["epoch"] == 1


# The radius of each method.


@slow
@pytest.mark.parametrize("name", tasks.NAMES)
def test_every_method_but_the_base_has_a_radius_and_what_is_searched_may_be_traced(name):
    method = registry.get(tasks.NAMES[name])
    radius, options = method.radius, method.options
    assert bool(radius) == (name != "sgd")
    assert all(options[option].default > 0 for option in radius)
    task = tasks.make(tasks.images(), name, model=tasks.Flat(norm=False), lr=0.1)
    values = {
        k: v for axis in search.axes(task.entries[name], rate=True) for k, v in axis.start.items()
    }

    def first(values):
        entries = {name: task.entries[name].at(values)}
        step, start, key = tasks.begin(dataclasses.replace(task, entries=entries), name)
        batch = task.dataset.train.x[:16], task.dataset.train.y[:16]
        return step(key, start(), batch, key, task.dataset.train).params

    jax.eval_shape(first, values)


# Examples, labels and seeds.


@pytest.fixture(scope="module")
def small(data):
    options = {"batch_size": 8, "seeds": 3, "seed_offset": 4, "label_noise": 0.25}
    model = tasks.Flat(norm=False)
    return tasks.make(from_arrays(**data), "sgd", "sam", "gsam", model=model, **options)


def rows(examples):
    return {row.tobytes() for row in examples.x}


def test_a_fifth_of_the_training_examples_is_held_out_class_by_class(small):
    """With labels as noisy, for seeds that no comparison has."""
    found, before = search.held_out(small), small.dataset
    train, test = found.dataset.train, found.dataset.test
    assert (len(train.y), len(test.y)) == (32, 8)
    assert rows(train) | rows(test) == rows(before.train)
    assert not rows(test) & (rows(train) | rows(before.test))
    assert sorted(np.bincount(test.y)) == [2, 3, 3]
    for labels, clean, wrong in (
        (noisy_labels(found, found.seeds), train.y, 8),
        (noisy_labels(found, found.seeds, held_out=True), test.y, 2),
    ):
        assert np.count_nonzero(labels != clean, axis=1).tolist() == [wrong] * 2
    late = search.held_out(dataclasses.replace(small, seeds=(2**31 - 1,)))
    assert all(10**6 < seed < 2**31 for seed in (*found.seeds, *late.seeds))


def test_what_cannot_be_held_out_is_told(small):
    few = Examples(*(of[:9] for of in small.dataset.train))
    few = dataclasses.replace(small, dataset=dataclasses.replace(small.dataset, train=few))
    with pytest.raises(UserError, match=r"leaves 7 of 9 .* fewer than a batch of 8; use"):
        search.held_out(few)


# The search.


@slow
def test_a_traced_value_trains_as_the_same_value_given(small):
    values = [{"rho_max": 0.4, "rho_min": 0.1}, {"rho_max": 0.8, "weight_decay": 0.3}]
    values = [{"rho_min": 0.1, "weight_decay": 0.03, **of} for of in values]
    run = training.Training(small, devices.choose(1))
    (runner,) = (runner for runner in run.runners if runner.name == "gsam")
    each = *values, values[0]
    first, second, again = (run.trial(runner, of, lambda share: None) for of in each)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    for found, of in zip((first, second), values, strict=True):
        entries = {"gsam": small.entries["gsam"].at(of)}  # constants of its program
        expected = tasks.run(dataclasses.replace(small, entries=entries))["gsam"].curves
        for measure, curve in found.items():
            np.testing.assert_allclose(curve, expected[measure], rtol=1e-5)
    assert np.any(first["train_loss"] != second["train_loss"])


@slow
def test_accuracies_are_on_held_out_examples_with_their_labels(small):
    """Against a network that is applied by hand."""
    task = search.held_out(small)
    labels = noisy_labels(task, task.seeds, held_out=True)
    outcome = tasks.run(dataclasses.replace(task, entries={"sgd": task.entries["sgd"]}))["sgd"]
    for i, variables in enumerate(outcome.variables.values()):
        predicted = task.model.apply(variables, task.dataset.test.x, train=False).argmax(-1)
        expected = np.mean(predicted == labels[i])
        assert outcome.curves["test_accuracy"][-1, i] == pytest.approx(expected)


def searches(small, monkeypatch, count=5):
    """A whole search, and what its display was told."""
    options, kept, listener = Compare(tune=True, trials=count), search.Kept({}), tasks.Silent()
    monkeypatch.setattr(search, "Progress", lambda *of: nullcontext(listener))
    search.run(search.held_out(small), devices.choose(1), options, kept, None)
    return kept.trials, listener


@slow
def test_seeds_that_an_accelerator_trains_together(small, monkeypatch):
    """Are those that a CPU trains one after the other, with one program per method."""
    one, listener = searches(small, monkeypatch)
    assert listener.pieces == pytest.approx(dict.fromkeys(small.entries, 5))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    several, _ = searches(small, monkeypatch)
    for name, trials in one.items():
        assert len(trials) == len(several[name]) == 5
        for a, b in zip(trials, several[name], strict=True):
            assert a.values == b.values
            np.testing.assert_allclose(a.held_out, b.held_out, atol=1e-6)


def test_each_method_is_searched_along_what_it_has(small):
    polyak = tasks.make(small.dataset, "sam_polyak", "sgd", batch_size=8, weight_decay=0.0)
    for task, name, rate, expected in (
        (small, "gsam", False, [["rho_max", "rho_min"], ["weight_decay"]]),
        (small, "sam", True, [["rho"], ["weight_decay"], ["lr"]]),
        (polyak, "sam_polyak", False, [["rho"]]),
        (polyak, "sgd", False, []),  # a weight decay of zero stays
    ):
        assert [[*axis.start] for axis in search.axes(task.entries[name], rate)] == expected
    assert [*choice.points([], 0)] == [()]


# The command.


class Search:
    """In the place of the trainer of the search: accuracy is best at some values of a method."""

    def __init__(self):
        self.best = {"sam": {"rho": 2.0, "weight_decay": 0.0015}}
        self.trials, self.interrupt_after = [], None

    def __call__(self, task, place):
        self.task = task
        pairs = task.entries.items()
        self.runners = [SimpleNamespace(name=name, entry=entry) for name, entry in pairs]
        return self

    def trial(self, runner, values, tick):
        if len(self.trials) == self.interrupt_after:
            raise KeyboardInterrupt
        self.trials.append((runner.name, values))
        tick(1.0)
        best = {"weight_decay": 5e-4, "rho": 0.5, **self.best.get(runner.name, {})}
        far = sum(abs(np.log2(value / best.get(name, value))) for name, value in values.items())
        last = np.full(len(self.task.seeds), 0.9 - 0.05 * far)
        accuracy = np.stack([last + 0.02 * (i == 3) for i in range(runner.entry.recipe.epochs)])
        return {"test_accuracy": accuracy, "train_loss": np.ones_like(accuracy)}

    def of(self, method, name):
        """The values of a method that were tried, in order."""
        return [values[name] for of, values in self.trials if of == method]


@pytest.fixture
def trials(monkeypatch, trainer):
    """Searches that train nothing; the comparison after them does not, either."""
    found = Search()
    monkeypatch.setattr(search, "Training", found)
    monkeypatch.setattr(comparison, "_draw", lambda *args: None)
    return found


@pytest.fixture
def command(archive, tmp_path, capsys):
    data = shutil.copy(archive, tmp_path / "\udcff.npz")  # which is no UTF-8

    def run(*more, methods=("--methods", "sgd", "sam")):
        options = f"--dataset npz:{data} --batch-size 20 --epochs 5 --tune"
        if "--weight-decay" not in more:
            options += " --weight-decay 0.0005"
        code = main(["compare", *options.split(), *methods, "--out", str(tmp_path / "out"), *more])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def test_all_methods_are_trained_with_what_was_chosen(command, trials, trainer, tmp_path):
    code, table, errors = command()
    assert code == 0
    sam, sgd = (trainer.task.entries[name] for name in ("sam", "sgd"))
    assert (sam.variant.hyperparameters, sam.recipe.weight_decay) == ({"rho": 2.0}, 0.0015)
    assert sgd.recipe.weight_decay == 5e-4
    assert len(trainer.task.dataset.train.y) == 40 > len(trials.task.dataset.train.y)
    assert [len(trials.of(name, "weight_decay")) for name in ("sgd", "sam")] == [17, 17]
    assert "chosen on a fifth of the training examples, held out with the labels" in errors
    assert re.search(r"^sam +ρ 2, .*4: 50\.00 ± 0\.00 ", table, re.M)
    sam = results.from_json(tmp_path / "out" / "results.json")["methods"][1]
    assert sam["sources"]["rho"] == "chosen by --tune, around 0.5"
    chosen = {"value": 0.0015, "source": "chosen by --tune, around 0.0005"}
    assert sam["settings"]["weight_decay"] == chosen
    assert sam["tune"]["chosen"] == {"rho": 2.0, "weight_decay": 0.0015}
    assert (len(sam["tune"]["trials"]), sam["tune"]["epoch"]) == (17, 4)
    assert not (tmp_path / "out" / "tune.json").exists()


def test_the_accuracy_after_the_chosen_epoch_is_that_of_the_tested_curve():
    curve = np.array([[0.1, 0.2], [0.3, 0.4], [0.2, 0.3]], np.float32)
    outcome = SimpleNamespace(
        curves={"test_accuracy": curve, "train_loss": np.ones((3, 2))},
        **{"sharpness": curve[0], "seconds": [1.0], "cost": 1.0, "compile_seconds": 1.0},
    )
    found = results._of_method({"tune": {"epoch": 2}}, [0, 1], outcome, words.Score())
    assert [seed["tuned_test_accuracy"] for seed in found["seeds"]] == [0.3, 0.4]


def test_the_search_starts_at_what_is_given_and_has_the_trials_that_are_given(command, trials):
    assert command("--sam.rho", "1.5", "--weight-decay", "0.01", "--trials", "3")[0] == 0
    assert trials.of("sam", "rho") == pytest.approx([0.375, 0.375, 0.375])
    assert trials.of("sam", "weight_decay") == pytest.approx([0.00111, 0.01, 0.09])
    assert len(trials.of("sgd", "weight_decay")) == 3


def test_the_learning_rate_is_searched_too_and_other_hyperparameters_are_swept(
    command, trials, tmp_path
):
    trials.best = {"asam p 2": {"lr": 0.2}}
    assert command("--tune-lr", "--asam.p", "2", "inf", methods=("--methods", "asam"))[0] == 0
    assert len(trials.of("asam p 2", "lr")) == len(trials.of("asam p inf", "lr")) == 40
    (two, _) = results.from_json(tmp_path / "out" / "results.json")["methods"]
    assert two["settings"]["lr"] == {"value": 0.2, "source": "chosen by --tune, around 0.1"}
    assert trials.task.entries["asam p inf"].variant.values["p"] == np.inf
    trials.best = {"ada_sam": {"lr": 0.2}}
    assert command("--tune-lr", methods=("--methods", tasks.NAMES["ada_sam"]))[0] == 0
    (of,) = results.from_json(tmp_path / "out" / "results.json")["methods"]
    assert [*of["tune"]["around"]] == ["ada_sam.rho", "weight_decay", "lr"]
    assert (of["hyperparameters"]["lr"], of["settings"]["lr"]["value"]) == (0.03, 0.2)


def test_a_search_that_is_interrupted_goes_on(command, trials, trainer, tmp_path):
    _, table, _ = command()
    whole = trials.trials
    expected = results.from_json(tmp_path / "out" / "results.json")
    trials.trials, trials.interrupt_after = [], 30  # amid the neighbours of a point
    code, _, errors = command()
    assert code == 130
    assert "/tune.json; --resume goes on." in errors
    begun = trials.trials
    trials.trials, trials.interrupt_after = [], None
    code, again, errors = command("--resume")
    assert (code, again) == (0, table)
    assert begun + trials.trials == whole
    assert "starting from the beginning" not in errors
    assert results.from_json(tmp_path / "out" / "results.json") == expected
    assert trainer.began_at == [0, 0]


def test_a_finished_search_is_not_repeated_nor_its_checkpoint_lost(
    command, trials, trainer, tmp_path
):
    trainer.interrupt_after = 2
    assert command("--checkpoint-every", "2")[0] == 130
    kept = json.loads((tmp_path / "out" / "tune.json").read_text())
    assert [len(of) for of in kept["trials"].values()] == [17, 17]
    trials.trials.clear()
    code, _, errors = command()
    assert (code, "add --resume" in errors) == (2, True)
    trainer.interrupt_after = None
    assert command("--resume")[0] == command("--resume")[0] == 0  # the second prints the table
    assert trainer.began_at == [0, 2]
    assert trials.trials == []


def test_the_search_of_another_run_is_refused(command, trials, tmp_path):
    trials.interrupt_after = 3
    assert command()[0] == 130
    code, _, errors = command("--resume", "--sam.rho", "0.25", "--lr", "0.2")
    expected = "tune.json is of a run with other settings: --lr 0.1 (now 0.2), --sam.rho 0.5 (now 0"
    assert (code, expected in errors) == (2, True)
    trials.trials, trials.interrupt_after = [], 0
    code, _, errors = command("--sam.rho", "0.25")  # without --resume it takes the place
    assert (code, "--resume" in errors) == (130, False)
    assert not (tmp_path / "out" / "tune.json").exists()
