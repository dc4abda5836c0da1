"""What a run leaves behind, from given results: files, table, figures, page, metrics."""

import csv
import io
import json

import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console
from scipy import stats

from sam_optax.experiments.errors import UserError
from sam_optax.experiments.methods.registry import DEFAULT, METHODS
from sam_optax.experiments.reporting import figures, frontier, html, palette, results, sweep, table
from sam_optax.experiments.reporting.live import Live

SEEDS = (5, 6, 7)
EPOCHS = 4
HOSTILE = "npz:/tmp/sales_$2020_$2021 [bold]\udcff\n</td><script>.npz"


def of_method(name, loss, hyperparameters=None, accuracy=(0.5, 0.75, 1.0)):
    """What became of a method; the loss of a seed that diverged is None."""
    kept = [i for i, value in enumerate(loss) if value is not None]
    watched = {"cosine": [1.0] * EPOCHS, "loss_rise": [None] * EPOCHS}
    watched |= {"ascent_norm": [0.5] * EPOCHS, "sharp_norm": [0.6] * EPOCHS}
    sharpness = (0.1, 0.2, 0.3)[: len(loss)]
    measures = {
        "test_accuracy": accuracy,
        "best_test_accuracy": accuracy,
        "train_loss": loss,
        "sharpness": sharpness,
    }
    return {
        "name": name,
        "method": name.split()[0],
        "title": METHODS[name.split()[0]].title,
        "hyperparameters": hyperparameters or {},
        "sources": dict.fromkeys(hyperparameters or {}, "default"),
        "settings": {},
        "epochs": EPOCHS,
        "steps_per_epoch": 4,
        "batch_size": 10,
        "gradients": 2.0,
        "step_cost": 1.875,
        "epoch_seconds": 2.0,
        "compile_seconds": 1.0,
        "examples_per_second": 60.0,
        "diverged": len(loss) - len(kept),
        "summary": {
            key: results.summary(np.array([values[i] for i in kept], float))
            for key, values in measures.items()
        },
        "seeds": [
            {
                "seed": SEEDS[i],
                "diverged": i not in kept,
                **{key: values[i] for key, values in measures.items()},
                "best_epoch": EPOCHS,
                "curves": {
                    "test_accuracy": [accuracy[i]] * EPOCHS,
                    "train_loss": [loss[i]] * EPOCHS,
                    **(watched if hyperparameters else {}),
                },
            }
            for i in range(len(loss))
        ],
    }


def of_run(*methods, name="npz:small.npz", **settings):
    given = {
        "model": "mlp",
        "label_noise": 0.25,
        "optimizer": "sgd",
        "lr": 0.1,
        "schedule": "cosine",
        "momentum": 0.9,
        "weight_decay": 0.0005,
        "sharpness_rho": 0.5,
        **settings,
    }
    for row in methods:
        row["differences"] = results.differences(row, methods)
    return {
        "format": results.FORMAT,
        "format_version": results.FORMAT_VERSION,
        "settings": {key: {"value": x, "source": "default"} for key, x in given.items()},
        "dataset": {
            "name": name,
            "train_examples": 40,
            "test_examples": 13,
            "example_shape": [6],
            "classes": 3,
            "sha256": "0" * 64,
        },
        "parameters": 1234,
        "seeds": list(SEEDS[: len(methods[0]["seeds"])]),
        "notes": [],
        "units": results.UNITS,
        "versions": results.versions(),
        "methods": list(methods),
    }


@pytest.fixture
def found():
    return of_run(
        of_method("sgd", [1.0, 2.0, 3.0]),
        of_method("sam", [1.0, None, 2.0], {"rho": 0.5}),
        of_method("asam", [None] * 3, {"rho": 2.0, "eta": 0.01}),
    )


def printed(found, width=120):
    file = io.StringIO()
    table.print_results(Console(file=file, width=width), found)
    return file.getvalue()


def rows(text):
    return {line.split()[0]: line for line in text.splitlines() if line}


def test_json_is_strict_and_comes_back(found, tmp_path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    found["dataset"]["name"] = HOSTILE
    content = results.to_json(found)
    assert json.loads(content, parse_constant=refuse) == found
    (tmp_path / "results.json").write_bytes(content)
    assert results.from_json(tmp_path / "results.json") == found
    assert results.from_json(tmp_path / "nothing") is None
    (tmp_path / "other.json").write_text("[1]")
    assert results.from_json(tmp_path / "other.json") is None


@pytest.mark.parametrize(
    "older",
    [
        {"format": "sam_optax.compare", "format_version": 1},
        {"identity": {}, "points": []},
        {"format": results.FORMAT, "format_version": results.FORMAT_VERSION + 1},
    ],
)
def test_results_of_another_version_are_refused_by_name(older, tmp_path):
    path = tmp_path / "results.json"
    path.write_text(json.dumps(older))
    with pytest.raises(UserError, match=rf"{path}: has format \S+ \d of another version"):
        results.from_json(path)


def test_numbers_are_the_shortest_of_their_float32():
    assert results.number(np.float32(0.1)) == 0.1
    assert results.number(np.float32("nan")) is None
    low, high = stats.t.interval(0.95, 2, loc=0.75, scale=stats.sem([0.5, 0.75, 1.0]))
    several = results.summary(np.array([0.5, 0.75, 1.0]))
    assert several == {"mean": 0.75, "std": 0.25, "interval": pytest.approx((high - low) / 2)}
    assert results.summary(np.array([0.5])) == {"mean": 0.5, "std": None, "interval": None}
    assert results.summary(np.array([])) == {"mean": None, "std": None, "interval": None}


def test_differences_are_seed_by_seed_and_to_the_best_sam():
    found = of_run(
        of_method("sgd", [1.0] * 3, accuracy=(0.5, 0.6, 0.7)),
        of_method("sam 1", [1.0] * 3, {"rho": 0.1}, accuracy=(0.6, 0.6, 0.6)),
        of_method("sam 2", [1.0, 1.0, None], {"rho": 0.2}, accuracy=(0.7, 0.8, 0.1)),
        of_method("asam", [1.0, 1.0, 1.0], {"rho": 2.0}, accuracy=(0.8, 0.8, 0.8)),
    )
    sgd, first, second, asam = (method["differences"] for method in found["methods"])
    assert (list(sgd), list(first), list(second)) == (["sam"], ["sgd"], ["sgd"])
    gain = asam["sgd"]["test_accuracy"]
    ends = stats.ttest_rel([0.8] * 3, [0.5, 0.6, 0.7]).confidence_interval(0.95)
    assert gain["mean"] - gain["interval"] == pytest.approx(ends.low)
    assert gain["mean"] + gain["interval"] == pytest.approx(ends.high)
    assert asam["sam"]["to"] == "sam 2"
    assert asam["sam"]["test_accuracy"]["mean"] == pytest.approx(0.05)  # of two seeds
    text = printed(found)
    assert "+20.00 ± 24.84" in rows(text)["asam"]
    assert "of several radii, that of the best one" in text


def test_csv_has_a_line_for_every_run(found):
    lines = list(csv.DictReader(io.StringIO(results.to_csv(found).decode())))
    names = [(line["method"], line["seed"]) for line in lines]
    assert names == [(name, str(seed)) for name in ("sgd", "sam", "asam") for seed in SEEDS]
    assert lines[0] == {
        "method": "sgd",
        "seed": "5",
        "test_accuracy": "0.5",
        "best_test_accuracy": "0.5",
        "train_loss": "1.0",
        "sharpness": "0.1",
        "best_epoch": "4",
        "diverged": "0",
        "step_cost": "1.875",
    }
    assert (lines[4]["train_loss"], lines[4]["diverged"]) == ("", "1")


def test_variables_come_back_as_they_were(tmp_path):
    path = tmp_path / "params.npz"
    given = {"params": {"Dense_0": {"kernel": np.eye(2)}}, "batch_stats": {"mean": np.ones(3)}}
    path.write_bytes(results.params_to_npz({"sam 0.5": {6: given}, "sgd": {6: given, 7: given}}))
    with np.load(path) as archive:
        assert "sam 0.5/6/params/Dense_0/kernel" in archive.files
    loaded = results.load_params(path)
    assert (list(loaded), list(loaded["sgd"])) == (["sam 0.5", "sgd"], [6, 7])
    np.testing.assert_array_equal(loaded["sgd"][7]["params"]["Dense_0"]["kernel"], np.eye(2))
    np.testing.assert_array_equal(loaded["sgd"][7]["batch_stats"]["mean"], np.ones(3))
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(UserError, match=r"params\.npz: is damaged"):
        results.load_params(path)


def test_the_table_says_what_was_trained_on_and_what_came_out(found):
    text = printed(found)
    assert text.startswith(
        "\nnpz:small.npz: 40 training and 13 test examples, 3 classes\n"
        "25 % of the training labels are wrong; 3 seeds\n"
        "mlp; 4 epochs of 4 steps with batches of 10\n"
        "SGD: learning rate 0.1 (cosine to 0), momentum 0.9, weight decay 0.0005\n\n"
    )
    lines = rows(text)
    sgd = "sgd 75.00 ± 25.00 ± 62.10 75.00 ± 25.00 – +0.00 ± 0.00 0.2000 1.88"
    assert lines["sgd"].split() == sgd.split()
    assert "75.00 ± 35.36  ± 317.66" in lines["sam"]
    assert "1 of 3 diverged" in text
    assert lines["asam"].split()[-7:] == ["diverged", "–", "diverged", "–", "–", "–", "1.88"]
    assert "ρ 2, η 0.01" in lines["asam"]
    assert "ε of SAM with ρ 0.5 for all" in text
    assert max(map(len, text.splitlines())) <= 120


def test_a_narrow_terminal_is_told_what_it_does_not_show(found):
    assert "not shown" not in printed(found)
    text = printed(found, width=100)
    assert max(map(len, text.split("accuracy:")[0].splitlines())) <= 100
    assert "not shown:     sharpness, for lack of width" in text
    narrow = printed(found, width=40)
    assert "not shown:     sharpness, ± 95 %, best epoch," in narrow
    expected = ["sgd", "75.00", "±", "25.00", "–", "+0.00", "±", "0.00", "1.88"]
    assert rows(narrow)["sgd"].split() == expected  # numbers are not wrapped


def test_what_is_not_in_the_table_is_on_the_page(found):
    assert "train loss" not in printed(found)
    for method in found["methods"]:
        top5 = results.summary(np.array([0.9, 0.92, 0.94]))
        method["summary"] |= {"test_top5_accuracy": top5, "best_test_top5_accuracy": top5}
    page = html.html_page(found, {}).decode()
    for text in ("train loss\nnats", "best 95 %\n%", "best top-5\n%", "92.00 ± 2.00", "± 4.97"):
        assert text in page


def test_settings_that_differ_are_with_the_method():
    sgd, adam = of_method("sgd", [1.0]), of_method("sam", [1.0], {"rho": 0.1})
    sgd |= {"epochs": 8, "settings": {"epochs": {"value": 8, "source": "the paper"}}}
    clean = {"label_noise": 0.0, "momentum": None, "optimizer": "adamw", "warmup_steps": 9}
    text = printed(of_run(sgd, adam, **clean, preset="asam-cifar10", scale=0.1))
    assert "preset asam-cifar10\n" in text
    assert "clean labels; 1 seed\n" in text
    assert "mlp; epochs as below of 4 steps with batches of 10\n" in text
    assert "AdamW: learning rate 0.1 (cosine to 0 after 9 steps of warm-up), weight decay" in text
    assert "scaled down (--scale 0.1)" in text
    assert "epochs 8" in rows(text)["sgd"]
    assert "±" not in text.split("accuracy:")[0]
    text = printed(of_run(sgd, **{**clean, "optimizer": "rmsprop", "momentum": 0.8}))
    assert "RMSProp: learning rate 0.1 (cosine to 0 after 9 steps of warm-up), momentum 0.8" in text


ACCURACIES = {
    "sgd": (0.7, 0.8),
    "sam 0.5": (0.9, 0.94),
    "sam 0.7": (0.8, 0.8),
    "part 1": (0.9, 0.92),
    "msam 2": (0.5, 0.6),
}
COSTS = {"sgd": 1.0, "sam 0.5": 2.0, "sam 0.7": 2.0, "part 1": 1.1, "msam 2": 1.01}


def of_frontier(accuracies=ACCURACIES, diverged=()):
    methods = []
    for name, values in accuracies.items():
        rho = {"rho": float(name.split()[1])} if " " in name else {}
        loss = [None if name in diverged else 1.0] * len(values)
        methods.append({**of_method(name, loss, rho, values), "step_cost": COSTS[name]})
    return of_run(*methods, frontier=True)


def test_shares_are_of_the_best_sams_gain_and_intervals_students():
    points = frontier.points(of_frontier())
    shares = {p.hyperparameters.get("rho", 0): p.share for p in points}
    assert shares[0] == pytest.approx(0)
    assert shares[0.5] == pytest.approx(1)
    assert shares[0.7] == pytest.approx((0.8 - 0.75) / (0.92 - 0.75))
    assert shares[1] == pytest.approx((0.91 - 0.75) / (0.92 - 0.75))
    assert shares[2] < 0
    low, high = stats.t.interval(0.95, 1, loc=0.75, scale=stats.sem([0.7, 0.8]))
    ends = points[0].accuracy - points[0].interval, points[0].accuracy + points[0].interval
    assert ends == pytest.approx((low, high))
    single = frontier.points(of_frontier({"sgd": (0.9,), "sam 0.5": (0.8,), "part 1": (0.8,)}))
    assert all(np.isnan(p.interval) and np.isnan(p.share) for p in single)


def test_reaching_the_goal_takes_both():
    values = {"sgd": (0.5,), "sam 0.5": (0.9,), "part 1": (0.89,), "msam 2": (0.6,)}
    lines = rows(printed(of_frontier(values), width=100))
    assert "reached" in lines["part"]  # 97.5 % at 1.1
    assert "reached" not in lines["sam"]  # 100 % at 2
    assert "reached" not in lines["msam"]  # 25 % at 1.01


@pytest.mark.parametrize("diverged", [("part 1",), ("sgd",), tuple(ACCURACIES)])
def test_a_frontier_is_drawn_even_where_runs_diverged(diverged):
    found = of_frontier(diverged=diverged)
    assert "gain kept" in printed(found)
    assert list(drawn := figures.all_figures(found)) == ["frontier.png"]
    assert b"<h1>Accuracy against cost: mlp on" in html.html_page(found, drawn)


def test_a_frontier_that_was_not_timed_reaches_nothing():
    found = of_frontier()
    for method in found["methods"]:
        method["step_cost"] = None
    assert "reached" not in printed(found)
    assert figures.frontier(found).startswith(b"\x89PNG")


def test_figures_suit_the_run(found, monkeypatch):
    drawn = figures.all_figures(found)
    assert list(drawn) == ["curves.png", "bars.png", "steps.png"]
    assert all(of.startswith(b"\x89PNG") and len(of) > 20_000 for of in drawn.values())
    monkeypatch.setattr(figures, "png", lambda *of: b"")
    for i, names in ((0, ["curves.png"]), (2, ["curves.png", "steps.png"])):
        assert list(figures.all_figures({**found, "methods": found["methods"][i : i + 1]})) == names


def test_a_sweep_has_a_line_for_each_setting_of_what_else_varies(monkeypatch):
    def asam(rho, p):
        return of_method(f"asam {rho} {p}", [1.0] * 3, {"rho": rho, "p": p, "eta": 0.01})

    radii, norms = (0.1, 2.0, 0.5), (2.0, "inf")
    found = of_run(
        of_method("sgd", [1.0] * 3),
        of_method("rsam", [None] * 3, {"rho": 0.1, "lmbda": 2.0}),
        *(asam(rho, p) for rho in radii for p in norms),
    )
    assert sweep.options(found) == ["rho"]  # infinity is no place on an axis
    axes = Figure().subplots()
    sweep.over(axes, found, "rho")
    _, names = axes.get_legend_handles_labels()
    assert sorted(names) == ["asam, p 2", "asam, p inf", "sgd"]  # what has diverged is not drawn
    assert [line.get_xdata().tolist() for line, *_ in axes.containers] == [[0.1, 0.5, 2.0]] * 2
    assert axes.get_xscale() == "log"
    monkeypatch.setattr(figures, "png", lambda *of: b"")  # of the others
    name, drawn = next(iter(figures.all_figures(found).items()))
    assert name == "sweep.png"
    assert drawn.startswith(b"\x89PNG")


def test_every_method_has_one_look_that_no_other_has():
    assert {name for names in palette.METHODS.values() for name in names} == set(METHODS)
    looks = [palette.style(name) for name in METHODS]
    assert len({(look.color, look.linestyle) for look in looks}) == len(looks)
    assert len({(look.color, look.marker) for look in looks}) == len(looks)
    colours = ["#666666", "#0072B2", "#E69F00", "#009E73", "#D55E00"]
    assert [palette.style(name).color for name in DEFAULT] == colours
    sweep = palette.styles(["sgd", "sam", "sam"])
    assert sweep[1] == palette.style("sam")
    assert sweep[2].color == sweep[1].color
    assert sweep[2].linestyle != sweep[1].linestyle


def test_the_page_shows_everything(found):
    found["notes"] = ["the paper leaves <this> open"]
    page = html.html_page(found, {"curves.png": b"png"}).decode()
    assert "<h1>3 methods: mlp on npz:small.npz</h1>" in page
    assert "sgd 75.00 ± 25.00 %" in page
    assert "the paper leaves &lt;this&gt; open" in page
    assert 'src="data:image/png;base64,cG5n"' in page
    for text in ("sharpness rho", "1,234 params", "SHA-256", "examples\nper second", "5, 6, 7"):
        assert text in page
    alone = {**found, "methods": found["methods"][1:2]}
    assert "<h1>SAM: mlp on npz:small.npz</h1>" in html.html_page(alone, {}).decode()


@pytest.mark.filterwarnings("error")
def test_text_from_outside_is_never_markup(found):
    found["dataset"]["name"] = HOSTILE
    assert "sales_$2020_$2021 [bold]??</td><script>.npz" in printed(found)
    assert figures.curves(found).startswith(b"\x89PNG")
    page = html.html_page(found, {}).decode()
    assert "sales_$2020_$2021 [bold]??&lt;/td&gt;&lt;script&gt;.npz" in page
    found["dataset"]["name"] = "数据" * 100
    assert figures.curves(found).startswith(b"\x89PNG")


def lines_of(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_metrics_are_appended_and_rewound(tmp_path):
    with Live(tmp_path) as live:
        for epoch in (1, 2, 3):
            live.add("sam 0.5", 7, epoch, {"train_loss": np.float32(0.1), "x": float("nan")})
            assert len(lines_of(tmp_path)) == epoch
    point = {"method": "sam 0.5", "seed": 7, "epoch": 1, "train_loss": 0.1, "x": None}
    assert lines_of(tmp_path)[0] == point
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"method": "sam')  # killed meanwhile
    with Live(tmp_path, epochs=2) as live:
        live.add("sam 0.5", 7, 3, {"train_loss": 0.5})
    assert [(of["epoch"], of["train_loss"]) for of in lines_of(tmp_path)] == [
        (1, 0.1),
        (2, 0.1),
        (3, 0.5),
    ]
    with Live(tmp_path):
        assert lines_of(tmp_path) == []
    assert not (tmp_path / "metrics.jsonl").exists()  # as if it had not begun
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match=r"metrics\.jsonl cannot be written"), Live(tmp_path):
        pytest.fail("entered")


def test_tensorboard_has_the_same_points(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    for epochs in (0, 1):  # the second continues after the first epoch
        with Live(tmp_path, tensorboard=True, epochs=epochs) as live:
            for epoch in range(epochs + 1, 4):
                live.add("sam", 7, epoch, {"train_loss": epoch + epochs, "x": float("nan")})
    [path] = (tmp_path / "tensorboard" / "sam" / "seed_7").iterdir()
    content, events = path.read_bytes(), []
    while content:
        length = int.from_bytes(content[:8], "little")
        events.append(Event.FromString(content[12 : 12 + length]))
        content = content[16 + length :]
    points = [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value]
    assert points == [(1, "train_loss", 1.0), (2, "train_loss", 3.0), (3, "train_loss", 4.0)]
