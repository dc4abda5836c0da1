"""The remaining time, and how it is shown on terminals, in files and in notebooks."""

import io
import re

import pytest
from rich.console import Console

from sam_optax.experiments.reporting import progress
from sam_optax.experiments.reporting.progress import Estimate, Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("FORCE_COLOR", raising=False)


def test_kinds_not_measured_yet_cost_their_prior():
    estimate = Estimate({"sgd": (1.0, 3), "sam": (2.0, 3)})
    assert (estimate.remaining, estimate.fraction) == (None, 0)
    estimate.done("sgd", 5.0)
    assert estimate.remaining == pytest.approx(2 * 5 + 3 * 10)
    assert estimate.fraction == pytest.approx(1 / 9)
    estimate.done("sam", 7.0)
    assert estimate.remaining == pytest.approx(2 * 5 + 2 * 7)
    estimate.done("sam", 9.0)
    assert estimate.remaining == pytest.approx(2 * 5 + 8)


def test_the_estimate_follows_a_changing_load():
    estimate = Estimate({"sgd": (1.0, 100)})
    for seconds in [1.0] * 50 + [3.0] * 20:
        estimate.done("sgd", seconds)
    assert estimate.remaining == pytest.approx(30 * 3)


def test_shares_of_pieces_add_up():
    estimate = Estimate({"sam": (2.0, 2)})
    for _ in range(5):
        estimate.done("sam", 1.0, 0.1)
    assert estimate.remaining == pytest.approx(15)
    assert estimate.fraction == pytest.approx(0.25)
    for _ in range(15):
        estimate.done("sam", 1.0, 0.1)
    assert estimate.remaining == pytest.approx(0)
    assert estimate.fraction == pytest.approx(1)


def run(file, **console):
    work = {"sgd": (1.0, 2), "sharpness": (1.0, 1)}
    with Progress(Console(file=file, width=100, **console), work, epochs=2) as shown:
        shown.compiling("sgd", 1, 1)
        for kind, share in (("sgd", 0.5), ("sgd", 0.5), ("sgd", 1), ("sharpness", 1)):
            shown.done(kind, 65.0 * share, share)
    return file.getvalue()


def test_a_file_gets_lines_without_control_characters(monkeypatch):
    monkeypatch.setattr(progress, "_LINE_EVERY", 0.0)
    assert run(io.StringIO()).splitlines() == [
        "compiling sgd (1 of 1): 0 % done, time left not known yet",
        "training, epoch 1 of 2: 17 % done, 2:42 left",
        "training, epoch 1 of 2: 33 % done, 2:10 left",
        "training, epoch 2 of 2: 67 % done, 1:05 left",
        "measuring sharpness: 100 % done, 0:00 left",
    ]


def test_a_resumed_run_counts_what_was_done_before(monkeypatch):
    monkeypatch.setattr(progress, "_LINE_EVERY", 0.0)
    file = io.StringIO()
    work = {"sgd": (1.0, 8), "checkpoint": (0.5, 4)}
    with Progress(Console(file=file, width=100), work, epochs=8) as shown:
        shown.resumed({"sgd": 6, "checkpoint": 3})
        for kind in ("sgd", "sgd", "checkpoint"):
            shown.done(kind, 3600.0)
    assert file.getvalue().splitlines() == [
        "resuming after epoch 6 of 8: 75 % done, time left not known yet",
        "training, epoch 7 of 8: 85 % done, 1:30:00 left",
        "training, epoch 8 of 8: 95 % done, 30:00 left",
        "training, epoch 8 of 8: 100 % done, 0:00 left",
    ]


def test_other_commands_name_the_kind(monkeypatch):
    monkeypatch.setattr(progress, "_LINE_EVERY", 0.0)
    file = io.StringIO()
    work = {"sam [x]": (1.0, 1), "sgd": (1.0, 1)}
    with Progress(Console(file=file, width=100), work, "measuring") as shown:
        shown.done("sam [x]", 2.0)
        shown.done("sgd", 1.0)
    assert file.getvalue().splitlines() == [
        "measuring sam [x], 1 of 2: 50 % done, 0:02 left",
        "measuring sgd, 2 of 2: 100 % done, 0:00 left",
    ]


def test_a_terminal_gets_a_bar():
    text = run(Terminal())
    assert "\x1b[" in text
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert "measuring sharpness" in text
    assert "100 %" in text


@pytest.mark.parametrize(
    ("file", "environment", "console"),
    [
        (io.StringIO, {}, {}),
        (io.StringIO, {"FORCE_COLOR": "1"}, {}),
        (io.StringIO, {}, {"force_terminal": True}),
        (Terminal, {"TERM": "dumb"}, {}),
        (Terminal, {"TERM": "unknown", "FORCE_COLOR": "1"}, {}),
    ],
)
def test_elsewhere_there_are_few_lines_and_no_cursor_movements(
    file, environment, console, monkeypatch
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    text = run(file(), **console)
    assert not re.search(r"\x1b\[[0-9;?]*[A-HJKSTf-hlsu]", text)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    phases = [line.split()[0].strip(",") for line in plain.splitlines()]
    assert phases == ["compiling", "training", "measuring"]


def test_notebooks_get_a_bar_where_widgets_can_be_shown(monkeypatch):
    console = Console(file=io.StringIO(), force_jupyter=True)
    for found in (None, object()):
        monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name, f=found: f)
        assert progress.can_draw(console) == (found is not None)
