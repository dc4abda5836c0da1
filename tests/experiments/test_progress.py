"""Progress and other output: on terminals, in files, in notebooks, and where nobody can read it."""

import io
import os
import re

import pytest
import rich.console
import rich.table
import rich.text

from sam_optax.experiments.reporting import progress
from sam_optax.experiments.reporting.console import Console, say
from sam_optax.experiments.reporting.progress import Progress
from sam_optax.experiments.reporting.stream import Stream

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Broken(io.StringIO):
    """Takes so many writes."""

    left = 0

    def write(self, text):
        self.left -= 1
        if self.left < 0:
            raise BrokenPipeError(32, "Broken pipe")
        return super().write(text)


@pytest.fixture
def run(monkeypatch):
    """Shows pieces of work, each of which takes a minute, and returns what was written."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    now = [0.0]

    def run(file, work, *pieces, width=100):
        console = Console(file=file, width=width)
        console.get_time = lambda: now[0]
        with Progress(console, work) as shown:
            shown.show("compiling sgd (1 of 1)")
            for i, (kind, share) in enumerate(pieces, 1):
                phase = "measuring" if kind == "sharpness" else "training"
                shown.show(f"{phase} {kind}, {i}")
                now[0] += 60 * share
                shown.done(kind, share)
        return file.getvalue()

    return run


def test_a_file_gets_few_lines_and_no_time_before_a_twentieth_is_done(run):
    bar = run(Terminal(), {"sgd": (1.0, 100)}, *[("sgd", 1)] * 4)
    assert "training sgd, 4: 4 %" in bar
    assert "left" not in bar
    work = {"sgd": (1.0, 50), "sam": (2.0, 50), "sharpness": (2.0, 1)}
    pieces = [(kind, 1) for _ in range(50) for kind in ("sgd", "sam")]
    lines = run(io.StringIO(), work, *pieces, ("sharpness", 1)).splitlines()
    assert lines[:2] == ["compiling sgd (1 of 1): 0 %", "training sgd, 1: 0 %"]
    assert re.fullmatch(r"training sgd, 11: 11 %, 1:\d\d:\d\d left", lines[2])
    assert lines[-1] == "measuring sharpness, 101: 100 %"
    assert len(lines) <= 13


def test_the_remaining_time_is_measured(run):
    lines = run(io.StringIO(), {"sgd": (1.0, 40)}, *[("sgd", 1)] * 40).splitlines()
    assert lines[2:4] == [
        "training sgd, 4: 10 %, 0:36:00 left",
        "training sgd, 8: 20 %, 0:32:00 left",
    ]
    assert lines[-1] == "training sgd, 40: 100 %"


@pytest.mark.parametrize("colour", [True, False])
def test_a_terminal_gets_a_bar(run, monkeypatch, colour):
    if not colour:
        monkeypatch.setenv("NO_COLOR", "1")
    text = run(Terminal(), {"sgd": (1.0, 2)}, ("sgd", 0.5), ("sgd", 0.5), ("sgd", 1), width=60)
    assert bool(re.search(r"\x1b\[[0-9;]*[39][0-9]", text)) == colour
    text = ESCAPES.sub("", text)
    assert "training sgd, 3: 100 %" in text


@pytest.mark.parametrize(
    ("file", "environment"),
    [
        (io.StringIO, {"FORCE_COLOR": "1"}),
        (Terminal, {"TERM": "dumb"}),
        (Terminal, {"TERM": "unknown", "FORCE_COLOR": "1"}),
    ],
)
def test_elsewhere_there_are_no_cursor_movements(file, environment, run, monkeypatch):
    """Case 47 of the collected mistakes."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    work = {"sam [x]": (1.0, 2)}
    text = run(file(), work, ("sam [x]", 1))
    assert not re.search(r"\x1b\[[0-9;?]*[A-HJKSTf-hlsu]", text)
    lines = ["compiling sgd (1 of 1): 0 %", "training sam [x], 1: 0 %"]
    assert ESCAPES.sub("", text).splitlines()[:2] == lines


def test_notebooks_get_a_bar_where_widgets_can_be_shown(monkeypatch):
    console = rich.console.Console(file=io.StringIO(), force_jupyter=True)
    for found in (None, object()):
        monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name, f=found: f)
        assert progress.can_draw(console) == (found is not None)


@pytest.mark.parametrize("left", [0, 1])
@pytest.mark.parametrize("terminal", [False, True])
def test_the_work_goes_on_where_nothing_can_be_written(run, left, terminal):
    """Case 81 of the collected mistakes: a closed pipe, a full disk."""
    file = Broken()
    file.left, file.isatty = left, lambda: terminal
    stream = Stream(file)
    run(stream, {"sgd": (1.0, 3)}, ("sgd", 1), ("sgd", 1), ("sgd", 1))
    assert isinstance(stream.error, BrokenPipeError)
    assert stream.write("more") == 4


def test_a_closed_stream_and_letters_it_lacks_are_no_errors(monkeypatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(f"sys.{name}", None)
        say("nobody reads this", stderr=name == "stderr")
    raw = io.BytesIO()
    stream = Stream(io.TextIOWrapper(raw, encoding="ascii"))
    print("ρ ± 1", file=stream, flush=True)
    assert raw.getvalue() == b"? ? 1" + os.linesep.encode()


def test_escape_sequences_of_names_do_not_reach_the_terminal(run):
    """Case 82 of the collected mistakes."""
    hostile = "\x1b[2J\x1b]0;title\x07 \u202e[bold] a\rb"
    file = Terminal()
    console = Console(file=file, force_terminal=True, width=80)
    console.print(rich.table.Table(hostile), rich.text.Text(hostile), "n[/x].py")
    text = run(file, {hostile: (1.0, 1)}, (hostile, 1))
    left = re.sub(r"\x1b\[[0-9;]*m|\x1b\[\?25[hl]|\x1b\[[0-9]*[AK]", "", text)
    assert not {"\x1b", "\x07", "\u202e"} & set(left)
    assert "?[2J?]0;title" in left
