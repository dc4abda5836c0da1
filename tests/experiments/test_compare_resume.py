"""A comparison that was killed, continued from its checkpoint: the same results in the end."""

import csv
import json
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from sam_optax.experiments import results

pytestmark = pytest.mark.slow

EPOCHS = 100
DEADLINE = 120
FILES = ("params.npz", "curves.png", "bars.png", "steps.png", "results.csv", "results.json")
DIES = """
import os, signal, sys
event, name, times = {}
def audit(kind, arguments):
    global times
    if kind == event and f".{{name}}." in str(arguments[0]):
        times -= 1
        if times == 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(audit)
from sam_optax.__main__ import main
sys.exit(main())
"""
"""A process that kills itself where it opens or renames an unfinished file."""


@pytest.fixture(scope="module")
def start(archive, tmp_path_factory):
    """Starts processes that find each other's compiled programs in a cache."""
    cache = tmp_path_factory.mktemp("cache")
    environment = {
        **os.environ,
        "XLA_FLAGS": "",
        "MPLBACKEND": "Agg",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    arguments = f"compare --dataset npz:{archive} --batch-size 20 --seeds 2 --methods rsam fsam"

    def start(out, *more, dies_at=None):
        program = ["-m", "sam_optax"] if dies_at is None else ["-c", DIES.format(dies_at)]
        given = [*arguments.split(), "--epochs", str(EPOCHS), "--out", str(out), *more]
        return subprocess.Popen(
            [sys.executable, *program, *given],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    return start


def ended(process):
    """What a process that ends by itself prints."""
    try:
        out, errors = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert "Warning" not in errors
    return out, errors


@pytest.fixture(scope="module")
def uninterrupted(start, tmp_path_factory):
    """The directory and the output of a run without checkpoints."""
    out = tmp_path_factory.mktemp("whole")
    return out, ended(start(out))[0]


def killed(process, moment, delay):
    """Kills a process some time after a moment has come, unless it does so itself."""
    lines = []
    reader = threading.Thread(target=lambda: lines.extend(process.stderr), daemon=True)
    reader.start()
    end = time.monotonic() + DEADLINE
    try:
        while process.poll() is None and not moment(lines):
            assert time.monotonic() < end, lines
            time.sleep(0.0002)
        time.sleep(delay)
    finally:
        process.kill()
        process.wait(timeout=DEADLINE)
    reader.join(timeout=DEADLINE)
    process.stdout.close()
    process.stderr.close()
    assert process.returncode == -9, lines
    assert not any("Warning" in line for line in lines), lines


def moments(out):
    """Ten moments to kill the next process, over the life of a run.

    A moment is what to wait for and how long to wait then, or where the process kills itself.
    """
    rng = np.random.default_rng(0)

    def says(phase):
        return lambda lines: any(line.startswith(phase) for line in lines)

    def reaches(epoch):
        return lambda _: checkpointed(out) >= epoch

    epochs = [reaches(e) for e in np.sort(rng.choice(EPOCHS // 2, 4, replace=False)) + 1]
    return [
        (says("compiling"), rng.uniform(0, 1), None),
        *((epoch, rng.uniform(0, 0.02), None) for epoch in epochs[:2]),
        (lambda _: True, rng.uniform(0, 1.5), None),  # while it starts
        (lambda _: False, 0, ("os.rename", "checkpoint.msgpack", int(rng.integers(1, 5)))),
        *((epoch, rng.uniform(0, 0.02), None) for epoch in epochs[2:]),
        (says("measuring sharpness"), rng.uniform(0, 0.05), None),
        (lambda _: False, 0, ("open", str(rng.choice(FILES)), 1)),
        (lambda _: False, 0, ("os.rename", str(rng.choice(FILES[1:])), 1)),
    ]


def checkpointed(out):
    """The epochs that the checkpoint has done."""
    try:
        with (out / "checkpoint.msgpack").open("rb") as file:
            file.readline()
            return json.loads(file.readline())["epoch"]
    except FileNotFoundError:
        return 0


def without_times(out):
    found = json.loads((out / "results.json").read_text())
    for method in found["methods"]:
        assert method.pop("step_cost") > 0
        assert method.pop("epoch_seconds") > 0
    rows = list(csv.DictReader((out / "results.csv").read_text().splitlines()))
    return found, [{**row, "step_cost": None} for row in rows]


def table(text):
    """The table without the column of the step costs, and what is said of where the files are."""
    return [line.rsplit(maxsplit=1)[0] for line in text.splitlines()[:-1] if line]


@pytest.mark.skipif(os.name == "nt", reason="sends a POSIX signal")
def test_ten_kills_change_nothing(start, uninterrupted, tmp_path):
    out = tmp_path / "out"
    arguments = (out, "--checkpoint-every", "1", "--resume")
    for moment, delay, dies_at in moments(out):
        killed(start(*arguments, dies_at=dies_at), moment, delay)
    text, _ = ended(start(*arguments))
    whole, expected = uninterrupted
    assert table(text) == table(expected)
    assert without_times(out) == without_times(whole)
    ours, theirs = (results.load_params(path / "params.npz") for path in (out, whole))
    assert list(ours) == list(theirs) == ["rsam", "fsam"]
    with np.load(out / "params.npz") as a, np.load(whole / "params.npz") as b:
        assert a.files == b.files
        for name in a.files:
            np.testing.assert_array_equal(a[name].view(np.uint32), b[name].view(np.uint32))
    assert {p.name for p in out.iterdir()} == {p.name for p in whole.iterdir()}
