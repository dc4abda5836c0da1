"""Processes that are killed and go on: nothing is lost, and nothing changes."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name == "nt", reason="sends POSIX signals")]
DEADLINE = 200
DIES = """
import os, signal, sys
def audit(kind, arguments):
    if kind == "open" and {!r} in str(arguments[0]):
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(audit)
from sam_optax.__main__ import main
sys.exit(main())
"""
"""A process that kills itself where it opens a file."""


def epoch_in(out):
    if not (out / "checkpoint.npz").exists():
        return 0
    with np.load(out / "checkpoint.npz") as file:
        return json.loads(file["record"].tobytes())["epoch"]


@pytest.fixture(scope="module")
def start(archive):
    """Starts processes that find each other's compiled programs in a cache."""
    options = (
        f"compare --dataset npz:{archive} --batch-size 20 --epochs 40 --seeds 2 --methods rsam"
    )
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    pipes |= {"text": True, "env": {**os.environ, "MPLBACKEND": "Agg"}}

    def start(out, *more, dies_at=None, nohup=()):
        program = ["-m", "sam_optax"] if dies_at is None else ["-c", DIES.format(dies_at)]
        given = [*nohup, sys.executable, *program, *options.split(), "--out", str(out), *more]
        return subprocess.Popen(given, **pipes)

    return start


def ended(process, code=0):
    """What a process prints that ends by itself, or by what was sent to it."""
    try:
        out, errors = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
    assert process.returncode == code, errors
    assert "Warning" not in errors
    return out, errors


def send(process, number, out, more):
    """Sends a signal after the next checkpoints."""
    end, goal = time.monotonic() + DEADLINE, epoch_in(out) + more
    while process.poll() is None and epoch_in(out) < goal and time.monotonic() < end:
        time.sleep(0.002)
    process.send_signal(number)


def found_in(out):
    """What does not depend on times."""
    found = json.loads((out / "results.json").read_text())
    for method in found["methods"]:
        for name in ("step_cost", "epoch_seconds", "compile_seconds"):
            del method[name]
    with np.load(out / "params.npz") as file:
        params = {name: file[name].tobytes() for name in file.files}
    return found, params, {p.name for p in out.iterdir()}


def test_kills_and_signals_change_nothing(start, tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "out"
    ended(start(whole))
    arguments = (out, "--checkpoint-every", "1", "--resume")
    process = start(*arguments, nohup=["nohup"])
    send(process, signal.SIGHUP, out, 2)  # ignored
    send(process, signal.SIGKILL, out, 3)
    ended(process, -9)
    for number, code in {signal.SIGTERM: 143, signal.SIGHUP: 129}.items():
        send(process := start(*arguments), number, out, 2)
        hint, last = ended(process, code)[1].splitlines()[-2:]
        assert re.search(r"After epoch \d+ there is a checkpoint; --resume continues", hint)
        assert last == "sam_optax: interrupted."
    for name in ("/.checkpoint.npz.", "/.results.json.", "curves.png"):
        ended(start(*arguments, dies_at=name), -9)
    assert not (out / "report.html").exists()
    text, errors = ended(start(*arguments))  # which draws the figures
    assert f"This run is finished: its results are in {out}." in text
    assert "epoch" not in errors  # nothing was trained
    assert found_in(out) == found_in(whole)


LOST = """
import signal, time
from sam_optax.experiments import entry
class Callback:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)
def run(given):
    Callback()
    while True:
        time.sleep(0.01)
entry._run = run
raise SystemExit(entry.main())
"""


def test_a_signal_amid_a_callback_of_the_interpreter_is_not_lost():
    """Python ignores what such a callback raises: 2 of 28 interrupts, most while JAX compiles."""
    found = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stderr) == (143, "sam_optax: interrupted.\n")
