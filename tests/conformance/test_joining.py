"""A method that joins by one line in ``tests/methods.py`` gets the conformance tests in CI."""

import os
import pathlib
import subprocess
import sys

import pytest

TESTS = pathlib.Path(__file__).parents[1]
JOINS = """
import methods, optax
methods.METHODS["joined"] = optax.scale
methods.NAMES.append("joined")
methods.OURS.append("joined")
"""


@pytest.mark.slow
def test_a_method_that_joins_is_tested(tmp_path):
    (tmp_path / "joins.py").write_text(JOINS)
    found = {}
    for marked in ("not slow and not exhaustive", "slow", "exhaustive"):
        options = f"-n 0 -q --collect-only -p joins -k joined {TESTS / 'conformance'}".split()
        result = subprocess.run(
            [sys.executable, "-m", "pytest", *options, "-m", marked],
            env=os.environ | {"PYTHONPATH": f"{tmp_path}:{TESTS}"},
            capture_output=True,
            text=True,
            check=False,
        )
        found[marked] = {
            line.partition("[")[0] for line in result.stdout.splitlines() if "joined" in line
        }
    assert len(found["not slow and not exhaustive"]) > 8, found
    assert len(found["slow"]) > 2
    assert found["exhaustive"] == set()
