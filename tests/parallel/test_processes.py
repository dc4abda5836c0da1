"""Two processes over loopback train to the params of one process with the whole batch."""

import os
import pathlib
import re
import socket
import subprocess
import sys

import numpy as np
import pytest

SCRIPT = pathlib.Path(__file__).with_name("two_processes.py")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def train(method, count):
    """The params that each of ``count`` processes ends with."""
    path = os.pathsep.join([str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), method, str(i), str(count), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for i in range(count)
    ]
    try:
        results = [process.communicate(timeout=150) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, results, strict=True):
        assert process.returncode == 0, errors[-2000:]
    return [parameters(out) for out, _ in results]


def parameters(out):
    """What a process printed of its params; the communication library prints lines of its own."""
    lines = [line.split() for line in out.splitlines() if line.startswith(("bias ", "kernel "))]
    return np.array([float.fromhex(word) for _, *words in lines for word in words])


@pytest.mark.parametrize("method", ["sam", "fsam", "rsam"])
@pytest.mark.slow
@pytest.mark.sample("fsam", "rsam")  # averages and draws that have to agree
def test_two_processes_equal_one(method):
    (single,) = train(method, 1)
    first, second = train(method, 2)
    np.testing.assert_array_equal(first, second)
    assert single.size == 15
    np.testing.assert_allclose(first, single, rtol=1e-5, atol=1e-7)


DIES = """
import os, signal, sys
times = 3
def audit(event, arguments):
    global times
    if event == "open" and "metrics.jsonl" in str(arguments[0]):
        times -= 1
        if not times:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(audit)
from sam_optax.__main__ import main
sys.exit(main())
"""
"""A run that is killed when it writes what it has measured of the second epoch."""


@pytest.fixture
def archive(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {f"x_{part}": rng.normal(size=(n, 3)) for part, n in (("train", 40), ("test", 12))}
    labels = {f"y_{part}": np.arange(n) % 2 for part, n in (("train", 40), ("test", 12))}
    np.savez(tmp_path / "data.npz", **arrays, **labels)
    return tmp_path / "data.npz"


def command(archive, out, *more):
    options = ["--methods", "rsam", "--seeds", "1", "--batch-size", "20", "--epochs", "3"]
    return ["compare", "--dataset", f"npz:{archive}", *options, "--out", str(out), *more]


def start(arguments, program=("-m", "sam_optax"), other=("-m", "sam_optax")):
    """Both processes of a run."""
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "JAX_PLATFORMS": "cpu",
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
        "JAX_NUM_PROCESSES": "2",
    }
    return [
        subprocess.Popen(
            [sys.executable, *start_with, *arguments, "--distributed"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**environment, "JAX_PROCESS_ID": str(i)},
        )
        for i, start_with in enumerate((program, other))
    ]


@pytest.mark.slow
def test_a_run_of_two_processes_is_killed_and_goes_on_to_the_params_of_one(archive, tmp_path):
    from sam_optax.__main__ import main

    assert main(command(archive, tmp_path / "one")) == 0
    arguments = command(archive, tmp_path / "two", "--checkpoint-every", "1", "--resume")
    first, second = start(arguments, ("-c", DIES))
    try:
        errors = first.communicate(timeout=150)[1]
        lost = second.communicate(timeout=60)[1]  # it ends by itself, within a minute
    finally:
        first.kill()
        second.kill()
    assert first.returncode == -9, errors
    assert second.returncode != 0
    assert re.search(r"^sam_optax: .*--resume", lost, re.M)
    # Of one that could say nothing, another process does.
    assert "sam_optax: another process of the run was lost; start all of them again" in errors
    assert (tmp_path / "two" / "checkpoint" / "sam_optax_v3_1").is_dir()

    processes = start(arguments)
    try:
        printed = [process.communicate(timeout=150) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], printed
    assert "resuming after epoch 1 of 3" in printed[0][1]
    assert "The results are in" in printed[0][0]
    assert "test accuracy" not in printed[1][0]  # one process tells of the run
    assert not (tmp_path / "two" / "checkpoint").exists()
    with np.load(tmp_path / "one/params.npz") as one, np.load(tmp_path / "two/params.npz") as two:
        assert one.files == two.files
        for name in one.files:
            np.testing.assert_allclose(two[name], one[name], rtol=1e-4, atol=1e-6)
