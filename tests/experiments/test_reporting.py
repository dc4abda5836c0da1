"""What a run leaves behind, from given results: files, table, figures, page, metrics."""

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from sam_optax.experiments.errors import UserError
from sam_optax.experiments.methods.registry import METHODS
from sam_optax.experiments.reporting import axes, figures, page, results
from sam_optax.experiments.reporting.console import Console
from sam_optax.experiments.reporting.table import Result
from sam_optax.experiments.training.runner import Outcome
from sam_optax.experiments.training.task import ACCURACY

SEEDS, EPOCHS = (5, 6, 7), 4


def of_method(name, loss=(1.0,) * 3, values=None, accuracy=(0.5, 0.75, 1.0), cost=1.875, **more):
    """A method and what became of it; the loss of a seed that diverged is None."""
    kind, values = name.split()[0], values or {}
    method = {"name": name, "method": kind, "title": METHODS[kind].title, "settings": {}}
    method |= {"hyperparameters": values, "sources": dict.fromkeys(values, "default")}
    method |= {"epochs": EPOCHS, "steps_per_epoch": 4, "batch_size": 10, "gradients": 2.0}
    curves = {"test_accuracy": accuracy, "train_loss": loss}
    curves = {key: np.array([of[: len(loss)]] * EPOCHS, float) for key, of in curves.items()}
    sharpness = np.array((0.1, 0.2, 0.3)[: len(loss)])
    return method | more, Outcome(None, curves, sharpness, [2.0], 1.0, cost)


def of_run(*methods, metric=ACCURACY.record, **settings):
    given = {"model": "mlp", "label_noise": 0.25, "optimizer": "sgd", "lr": 0.1, "momentum": 0.9}
    given |= {"schedule": "cosine", "weight_decay": 0.0005, "sharpness_rho": 0.5, **settings}
    data = {"name": "npz:small.npz", "train_examples": 40, "test_examples": 13}
    data["described"] = "40 training and 13 test vectors"
    description = {
        "settings": {key: {"value": x, "source": "default"} for key, x in given.items()},
        "dataset": {**data, "example_shape": [6], "classes": 3, "sha256": "0" * 64},
        "seeds": list(SEEDS[: methods[0][1].curves["train_loss"].shape[1]]),
        "notes": [],
        "metric": metric,
        "methods": [method for method, _ in methods],
    }
    return results.collect(description, 1234, {of["name"]: outcome for of, outcome in methods})


@pytest.fixture
def found():
    sam = of_method("sam", [1.0, None, 2.0], {"rho": 0.5})
    asam = of_method("asam", [None] * 3, {"rho": 2.0, "eta": 0.01})
    return of_run(of_method("sgd", [1.0, 2.0, 3.0]), sam, asam)


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are drawn, and not compressed."""
    kept = []
    monkeypatch.setattr(figures, "png", lambda figure, *of: kept.append(figure) or b"png")
    return kept


def printed(found, width=120):
    file = io.StringIO()
    Console(file=file, width=width).print(Result(found), soft_wrap=True)
    return file.getvalue()


def rows(text):
    return {line.split()[0]: line for line in text.splitlines() if line}


def page_of(found, drawn=()):
    return page.html_page(found, dict(drawn)).decode()


def test_json_is_strict_and_comes_back(found, tmp_path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    found["dataset"]["name"] = "npz:/tmp/\udcff\n</td>.npz"
    path = tmp_path / "results.json"
    path.write_bytes(results.to_json(found))
    assert json.loads(path.read_bytes(), parse_constant=refuse) == found
    assert results.from_json(path) == found
    path.write_text("[1]")
    assert results.from_json(path) is results.from_json(tmp_path / "nothing") is None


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda of: of.update(format_version=3), "has format .* 3 of another version.*; use "),
        (lambda found: found.pop("settings"), "KeyError: 'settings'.*; restore "),
        (lambda found: found["methods"][1].update(summary=[]), "TypeError: .*; restore "),
    ],
)
def test_wrong_results_are_refused_by_file_and_field(found, tmp_path, spoil, reason):
    spoil(found)
    path = tmp_path / "results.json"
    path.write_bytes(results.to_json(found))
    refused = pytest.raises(UserError, match=rf"^{path}: .*{reason}[^\n]*$")
    with refused, results.describing(path):
        str(Result(results.from_json(path)))


def test_summaries_and_differences_are_those_of_scipy():
    found = of_run(
        of_method("sgd", accuracy=(0.5, 0.6, 0.7)),
        of_method("sam 1", values={"rho": 0.1}, accuracy=(0.6, 0.6, 0.6)),
        of_method("sam 2", [1.0, 1.0, None], {"rho": 0.2}, accuracy=(0.7, 0.8, 0.1)),
        of_method("asam", values={"rho": 2.0}, accuracy=(0.8, 0.8, 0.8)),
    )
    of, asam = found["methods"][0]["summary"]["test_accuracy"], found["methods"][3]["differences"]
    ends = stats.t.interval(0.95, 2, loc=0.6, scale=stats.sem([0.5, 0.6, 0.7]))
    assert (of["mean"] - of["interval"], of["mean"] + of["interval"]) == pytest.approx(ends)
    of = asam["sgd"]["test_accuracy"]
    ends = stats.ttest_rel([0.8] * 3, [0.5, 0.6, 0.7]).confidence_interval(0.95)
    assert (of["mean"] - of["interval"], of["mean"] + of["interval"]) == pytest.approx(ends)
    best = asam["sam"]["to"], asam["sam"]["test_accuracy"]["mean"]
    assert best == ("sam 2", pytest.approx(0.05))  # of the two seeds that have not diverged
    assert "+20.00 ± 24.84" in rows(printed(found))["asam"]
    assert results.number(np.float32(0.1)) == 0.1  # the shortest decimal
    assert results.summary(np.array([])) == {"mean": None, "std": None, "interval": None}


def test_the_documented_line_makes_a_table_of_every_run(found, tmp_path, monkeypatch):
    pandas = pytest.importorskip("pandas")
    page = (Path(__file__).parents[2] / "docs" / "experiments.md").read_text()
    [line] = re.findall(r"`(pandas\.json_normalize\(.*?)`", page)
    monkeypatch.chdir(tmp_path)
    Path("results.json").write_bytes(results.to_json(found))
    rows = eval(line, {"pandas": pandas, "json": json, "Path": Path}).to_dict("records")
    names = [(row["name"], row["seed"]) for row in rows]
    assert names == [(name, seed) for name in ("sgd", "sam", "asam") for seed in SEEDS]
    assert (rows[0]["test_accuracy"], rows[0]["curves.train_loss"]) == (0.5, [1.0] * EPOCHS)
    assert rows[4]["diverged"]


def test_the_table_says_what_was_trained_on_and_what_came_out(found):
    text = printed(found)
    assert text.startswith(
        "\nnpz:small.npz: 40 training and 13 test vectors\n"
        "25 % of the training labels are wrong; 3 seeds\n"
        "mlp; epochs 4, steps per epoch 4, batch size 10\n"
        "sgd: lr 0.1, schedule cosine, momentum 0.9, weight decay 0.0005\n\n"
    )
    lines = rows(text)
    sgd = "sgd 75.00 ± 25.00 ± 62.10 75.00 ± 25.00 – +0.00 ± 0.00 0.2000 1.88"
    assert lines["sgd"].split() == sgd.split()
    assert "75.00 ± 35.36  ± 317.66" in lines["sam"]
    assert "1 of 3 diverged" in text
    assert lines["asam"].split()[-7:] == ["diverged", "–", "diverged", "–", "–", "–", "1.88"]
    assert "ρ 2, η 0.01" in lines["asam"]
    assert re.search(r"^± 0.00: +all seeds are equal", text, re.M)
    assert "75.00 ± 25.00" in Result(found)._repr_mimebundle_((), ())["text/html"]


@pytest.mark.parametrize("width", [120, 40])
def test_a_narrow_terminal_is_told_what_it_does_not_show(found, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    text = printed(found, width=None)
    assert max(map(len, text.splitlines())) <= width
    assert ("not shown:    sharpness" in text) == (width < 120)
    accuracy = ["75.00", "±", "25.00"]  # numbers are not wrapped
    assert rows(text)["sgd"].split()[1:4] == accuracy


def test_settings_that_differ_are_with_the_method():
    own = {"epochs": {"value": 8, "source": "the paper"}}
    sgd, adam = of_method("sgd", [1.0], epochs=8, settings=own), of_method("sam", [1.0])
    text = printed(of_run(sgd, adam, label_noise=0.0, optimizer="adamw", preset="asam-cifar10"))
    for part in ("preset asam-cifar10\n", "\n1 seed\n", "mlp; epochs 4 or 8, ", "adamw: lr 0.1, "):
        assert part in text
    assert "epochs 8" in rows(text)["sgd"]
    assert "±" not in text.split("accuracy:")[0]  # one seed has no spread


@pytest.mark.parametrize("lost", ["", "sgd", "sam 0.5 sam 0.7"])
def test_accuracy_is_drawn_over_cost_also_where_runs_diverged(lost, drawn):
    means = {"sgd": 0.5, "sam 0.5": 0.9, "sam 0.7": 0.8, "part 1": 0.89}
    methods = [
        of_method(name, [None if name in lost else 1.0] * 3, accuracy=(mean,) * 3)
        for name, mean in means.items()
    ]
    figures.all_figures(of_run(of_method("every", cost=np.nan), *methods))
    panel = next(of.axes[0] for of in drawn if "relative to SGD" in of.axes[0].get_xlabel())
    best = {"sgd": 50, "sam": 90, "part": 89}
    left = {name: mean for name, mean in best.items() if name not in lost}
    assert panel.get_legend_handles_labels()[1] == [*left]
    heights = [line.get_ydata().item() for line, *_ in panel.containers]
    assert heights == pytest.approx([*left.values()])  # of each its best setting
    absent = panel.get_title("left")
    assert all((f"{name} " in absent) == (name in lost) for name in best)
    assert "every (not timed)" in absent


def test_figures_suit_the_run_and_say_what_they_do_not_show(found, drawn):
    assert list(figures.all_figures(found)) == ["curves.png", "cost.png"]
    curves = drawn[0]
    assert "asam (not known)" in curves.axes[1].get_title("left")
    assert curves.axes[0].collections  # bands
    figures.all_figures(of_run(of_method("sgd", [1.0])))
    assert [of.axes[0].get_ylabel() for of in drawn[2:]] == ["test accuracy (%)"]  # no cost
    assert not drawn[-1].axes[0].collections


def test_a_sweep_has_a_line_for_each_setting_of_what_else_varies(drawn):
    def asam(rho, p):
        return of_method(f"asam {rho} {p}", values={"rho": rho, "p": p, "eta": 0.01})

    def gsam(rho):  # both radii are one dimension
        return of_method(f"gsam {rho}", values={"rho_max": rho, "rho_min": rho / 10})

    found = of_run(
        of_method("sgd"),
        of_method("rsam", [None] * 3, {"rho": 0.1, "lmbda": 2.0}),
        *(asam(rho, p) for rho in (0.1, 2.0, 0.5) for p in (2.0, "inf")),
        *(gsam(rho) for rho in (0.1, 0.5)),
        of_method("fsam", values={"rho": 9.0}),
    )
    assert figures.swept(found) == ["rho", "rho_max", "rho_min"]  # infinity is no place on an axis
    assert next(iter(figures.all_figures(found))) == "sweep.png"
    rho, rho_max, _ = drawn[0].axes
    labels = {*rho.get_legend_handles_labels()[1]}
    assert labels == {"sgd", "asam, p 2", "asam, p inf", "gsam", "fsam"}
    assert "rsam (diverged)" in rho.get_title("left")
    (first, *_), (second, *_) = rho.containers
    assert first.get_xdata().tolist() == rho.get_xticks().tolist() == [0.1, 0.5, 2.0]
    assert not {*first.get_xdata()} & {*second.get_xdata()}  # none hides another
    assert rho.get_xscale() == "log"
    [[line, *_]] = rho_max.containers
    assert line.get_xdata().tolist() == [0.1, 0.5]


def test_trials_of_two_values_are_a_line_for_each_of_the_second(drawn):
    def trial(rho, decay):
        values, broken = {"rho": rho, "weight_decay": decay}, rho == 0.4
        return {"values": values, "held_out": [[0.1, rho], [0.1, None]], "broken_down": broken}

    trials = [trial(rho, decay) for rho in (0.1, 0.2, 0.4) for decay in (0.001, 0.01)]
    tune = {"trials": trials, "chosen": trials[2]["values"], "epoch": 1}
    nothing = {"trials": trials[:1], "chosen": {}, "epoch": 1}
    found = of_run(of_method("sgd", tune=nothing), of_method("sam", tune=tune))
    assert next(iter(figures.all_figures(found))) == "tune.png"
    (panel,) = drawn[0].axes  # of sgd there was nothing to choose
    assert panel.get_title("left") == "sam"
    assert panel.get_legend_handles_labels()[1] == ["weight decay 0.001", "weight decay 0.01"]
    marks = [of.get_marker() for of in panel.lines if len(of.get_xdata()) == 1]
    assert marks == ["*", "x", "x"]  # what was chosen, and what has broken down
    points = [of for line, *_ in panel.containers for of in line.get_xydata().tolist()]
    assert points[1] == [0.2, 10]


def test_methods_look_apart_and_variants_of_one_share_its_colour():
    def styles(methods):
        found = axes.by_method([{"method": name} for name in methods])
        return [axes.look(i, j) for i, rows in found for j, _ in enumerate(rows)]

    looks = styles([f"method {i}" for i in range(40)])
    for other in ("linestyle", "marker"):
        assert len({(look["color"], look[other]) for look in looks}) == len(looks)
    assert styles(["asam", "sgd"]) == styles(["sgd", "sam", "asam"])[::-2]
    _, sam, again = styles(["sgd", "sam", "sam"])
    assert [of for of in sam if sam[of] == again[of]] == ["color", "linewidth"]


def test_the_page_shows_what_this_run_uses(found):
    found["notes"] = ["the paper leaves <this> open"]
    found["settings"]["image_size"] = {"value": None, "source": "default"}
    page = page_of(found, {"curves.png": b"png"})
    assert "<h1>3 methods: npz:small.npz, 25 % wrong training labels, mlp</h1>" in page
    assert "the paper leaves &lt;this&gt; open" in page
    assert 'src="data:image/png;base64,cG5n"' in page
    for text in ("sharpness rho", "1,234 params", "SHA-256", "5, 6, 7"):
        assert text in page
    assert "image size" not in page
    alone = {**found, "methods": found["methods"][1:2]}
    assert "<h1>SAM: npz:small.npz, 25 % wrong" in page_of(alone)


def test_a_metric_of_the_user_s_takes_the_place_of_the_accuracy(drawn):
    """Lower is better, and nothing is in percent."""
    name = "loss"
    methods = [of_method("sgd"), of_method("sam", accuracy=(0.5, 0.25, 0.0))]
    for _, outcome in methods:
        outcome.curves[f"test_{name}"] = outcome.curves.pop("test_accuracy")
    metric = {"key": f"test_{name}", "name": name, "higher_is_better": False, "is_accuracy": False}
    found = of_run(*methods, metric=metric)
    assert found["methods"][1]["differences"]["sgd"][f"test_{name}"]["mean"] == -0.5
    text = printed(found)
    assert re.search(r"^sam +0\.2500 ± 0\.2500 ", text, re.M)
    assert "25.00" not in text
    assert found["units"][f"test_{name}"].startswith("mean over the test examples")
    figures.all_figures(found)
    assert drawn[0].axes[0].get_ylabel() == f"test {name}"
