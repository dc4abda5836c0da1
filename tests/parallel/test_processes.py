"""Two processes over loopback, one of them killed, train to the params of one process."""

import os
import re
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest

DIES = """
import os, signal, sys
def audit(event, arguments):
    if event == "open" and "params_epoch_2" in str(arguments[0]):
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(audit)
from sam_optax.__main__ import main
sys.exit(main())
"""
"""A run that is killed when it writes the networks after the second epoch."""


@pytest.fixture
def command(tmp_path):
    """A function of the folder of the results: averages and draws that have to agree."""
    rng = np.random.default_rng(0)
    arrays = {f"x_{part}": rng.normal(size=(n, 3)) for part, n in (("train", 40), ("test", 12))}
    labels = {f"y_{part}": np.arange(n) % 2 for part, n in (("train", 40), ("test", 12))}
    np.savez(tmp_path / "data.npz", **arrays, **labels)
    options = ["--methods", "rsam", "fsam", "--seeds", "1", "--batch-size", "20", "--epochs", "3"]
    data = f"npz:{tmp_path / 'data.npz'}"
    return lambda out: ["compare", "--dataset", data, *options, "--out", str(tmp_path / out)]


def run_both(arguments, first=("-m", "sam_optax")):
    """What two processes return and print, the first of them with a program of its own."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "JAX_PLATFORMS": "cpu",
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": "2",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, *program, *arguments, "--distributed"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**environment, "JAX_PROCESS_ID": str(i)},
        )
        for i, program in enumerate((first, ("-m", "sam_optax")))
    ]
    try:
        printed = [process.communicate(timeout=150) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *each) for process, each in zip(processes, printed, strict=True)]


@pytest.mark.slow
def test_a_run_of_two_processes_is_killed_and_goes_on_to_the_params_of_one(command, tmp_path):
    from sam_optax.__main__ import main

    assert main(command("one")) == 0
    arguments = [*command("two"), "--checkpoint-every", "1", "--save-every", "2", "--resume"]
    (code, _, errors), (of_second, _, lost) = run_both(arguments, ("-c", DIES))
    assert code == -signal.SIGKILL, errors
    assert of_second != 0  # it ends by itself
    assert re.search(r"^sam_optax: .*--resume", lost, re.M)
    # Of one that could say nothing, another process does.
    assert "sam_optax: another process of the run was lost; start all of them again" in errors
    assert (tmp_path / "two" / "checkpoint" / "sam_optax_v3_1").is_dir()

    (code, printed, errors), (of_second, by_second, _) = run_both(arguments)
    assert (code, of_second) == (0, 0), errors
    assert "resuming after epoch 1 of 3" in errors
    assert "The results are in" in printed
    assert "test accuracy" not in by_second  # one process tells of the run
    assert not (tmp_path / "two" / "checkpoint").exists()
    with np.load(tmp_path / "one/params.npz") as one, np.load(tmp_path / "two/params.npz") as two:
        assert one.files == two.files
        for name in one.files:
            np.testing.assert_allclose(two[name], one[name], rtol=1e-4, atol=1e-6)
