"""The code of the page on trainers: run here, or compiled where it needs another environment."""

import pathlib
import re
from typing import Any

import numpy as np
import pytest

import sam_optax

DOCS = pathlib.Path(__file__).parents[2] / "docs"
MARKED = r"<!-- run with: (\w+) -->\n```python\n(.*?)```"
BLOCKS = {
    name: code
    for page in ("trainers.md", "frameworks.md")
    for name, code in re.findall(MARKED, (DOCS / page).read_text(), re.DOTALL)
}
# No environment of the tests has their libraries, and some need a jax of their own. The page names
# the versions with which each was run.
ELSEWHERE = ["keras_fit", "keras_step", "numpyro", "brax", "penzai"]
ELSEWHERE += ["levanter", "kauldron", "kauldron_step", "easydel", "maxtext", "tunix"]

# What other libraries warn of at their import is theirs.
pytestmark = pytest.mark.filterwarnings("default")


def run(name: str, **names: Any) -> dict[str, Any]:
    """What the code of the page has defined, started with these names."""
    exec(compile(BLOCKS[name], f"docs: {name}", "exec"), names)
    return names


def test_every_block_that_is_marked_is_tested():
    tested = re.findall(r'\brun\(\s*"(\w+)"', pathlib.Path(__file__).read_text())
    assert {*tested, *ELSEWHERE} == set(BLOCKS)


@pytest.mark.parametrize("name", BLOCKS)
def test_every_block_uses_what_there_is(name):
    """Also where the library needs an environment of its own."""
    compile(BLOCKS[name], name, "exec")
    used = re.findall(r"\bsam_optax\.(\w+)", BLOCKS[name])
    assert [attribute for attribute in used if not hasattr(sam_optax, attribute)] == []


def test_optimistix():
    pytest.importorskip("optimistix")
    first = run("optimistix")
    for names in (first, run("optimistix_alternating", **first)):
        np.testing.assert_allclose(names["found"], names["target"], atol=1e-3)


def test_the_generator_of_the_page_repeats():
    text = (DOCS / "trainers.md").read_text()
    (code,) = re.findall(r"  ```python\n(  def twice\(.*?)  ```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(re.sub(r"^  ", "", code, flags=re.MULTILINE), names)
    assert list(names["twice"]("ab")) == list("aabb")
    assert list(names["twice"]("ab", random_start=True)) == list("aaabb")
