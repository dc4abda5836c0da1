"""Two processes over loopback train to the params of one process with the whole batch."""

import os
import pathlib
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
