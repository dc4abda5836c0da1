"""The remaining time, and how it is shown."""

import io
import re

import pytest
from rich.console import Console

from sam_optax.experiments import progress
from sam_optax.experiments.progress import Estimate, Progress


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_nothing_is_known_before_anything_is_measured():
    estimate = Estimate({"sgd": (1.0, 3)}, Clock())
    assert estimate.remaining is None
    assert estimate.fraction == 0


def test_kinds_not_measured_yet_cost_their_number_of_gradients():
    estimate = Estimate({"sgd": (1.0, 3), "sam": (2.0, 3)}, Clock())
    estimate.done("sgd", 5.0)
    assert estimate.remaining == pytest.approx(2 * 5 + 3 * 10)
    assert estimate.fraction == pytest.approx(1 / 9)


def test_measured_kinds_cost_what_they_cost():
    estimate = Estimate({"sgd": (1.0, 3), "sam": (2.0, 3)}, Clock())
    estimate.done("sgd", 5.0)
    estimate.done("sam", 7.0)
    assert estimate.remaining == pytest.approx(2 * 5 + 2 * 7)
    estimate.done("sam", 9.0)
    assert estimate.remaining == pytest.approx(2 * 5 + 8)


def test_the_estimate_follows_a_changing_load():
    estimate = Estimate({"sgd": (1.0, 100)}, Clock())
    for seconds in [1.0] * 50 + [3.0] * 20:
        estimate.done("sgd", seconds)
    assert estimate.remaining == pytest.approx(30 * 3)


def test_time_passes_between_pieces():
    clock = Clock()
    estimate = Estimate({"sgd": (1.0, 3)}, clock)
    estimate.done("sgd", 5.0)
    clock.now += 4
    assert estimate.remaining == pytest.approx(6)
    clock.now += 100
    assert estimate.remaining == 0


def test_all_done_is_one_and_zero():
    estimate = Estimate({"sgd": (1.0, 2), "sharpness": (1.7, 1)}, Clock())
    for kind in ("sgd", "sgd", "sharpness"):
        estimate.done(kind, 1.0)
    assert estimate.fraction == pytest.approx(1)
    assert estimate.remaining == 0


def test_pieces_of_an_earlier_process_are_done_but_not_measured():
    estimate = Estimate({"sgd": (1.0, 10), "sam": (2.0, 10)}, Clock())
    estimate.skip("sgd", 4)
    estimate.skip("sam", 4)
    assert estimate.fraction == pytest.approx(0.4)
    assert estimate.remaining is None
    estimate.done("sgd", 5.0)
    assert estimate.remaining == pytest.approx(5 * 5 + 6 * 10)
    assert estimate.fraction == pytest.approx(13 / 30)


def test_epochs_of_an_earlier_process_count(monkeypatch):
    monkeypatch.setattr(progress, "_LINE_EVERY", 0.0)
    file = io.StringIO()
    work = {"sgd": (1.0, 8), "checkpoint": (0.5, 4)}
    with Progress(Console(file=file, width=100), work, 8) as shown:
        shown.resumed({"sgd": 6, "checkpoint": 3})
        shown.compiling("sgd", 1, 1)
        for kind in ("sgd", "sgd", "checkpoint"):
            shown.done(kind, 60.0)
    assert file.getvalue().splitlines() == [
        "resuming after epoch 6 of 8: 75 % done, time left not known yet",
        "compiling sgd (1 of 1): 75 % done, time left not known yet",
        "training, epoch 7 of 8: 85 % done, 1:30 left",
        "training, epoch 8 of 8: 95 % done, 0:30 left",
        "training, epoch 8 of 8: 100 % done, 0:00 left",
    ]


def _run(file, **console):
    work = {"sgd": (1.0, 2), "sharpness": (1.0, 1)}
    with Progress(Console(file=file, width=100, **console), work, 2) as shown:
        shown.compiling("sgd", 1, 1)
        for kind in ("sgd", "sgd", "sharpness"):
            shown.done(kind, 65.0)
    return file.getvalue()


def test_a_file_gets_lines_without_control_characters(monkeypatch):
    monkeypatch.setattr(progress, "_LINE_EVERY", 0.0)
    text = _run(io.StringIO())
    assert text.splitlines() == [
        "compiling sgd (1 of 1): 0 % done, time left not known yet",
        "training, epoch 1 of 2: 33 % done, 2:10 left",
        "training, epoch 2 of 2: 67 % done, 1:05 left",
        "measuring sharpness: 100 % done, 0:00 left",
    ]


def test_a_file_gets_few_lines():
    phases = [line.split()[0].strip(",") for line in _run(io.StringIO()).splitlines()]
    assert phases == ["compiling", "training", "measuring"]


def test_a_terminal_gets_a_bar():
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", _run(io.StringIO(), force_terminal=True))
    assert "measuring sharpness" in text
    assert "100 %" in text
