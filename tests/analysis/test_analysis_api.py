"""The public names of the analysis: documented as those of the core, and kept out of it."""

import inspect
import re
import subprocess
import sys

import pytest
from helpers import sections

from sam_optax import analysis

PUBLIC = analysis.__all__


def test_all_is_sorted_and_complete():
    assert sorted(PUBLIC) == PUBLIC
    modules = {"style"}  # for the figures of the commands
    assert {name for name in vars(analysis) if not name.startswith("_")} - modules == set(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_docstrings_are_complete(name):
    """Of functions, with every parameter, and of results, with every field."""
    public = getattr(analysis, name)
    assert public.__module__.startswith("sam_optax.analysis._")
    first = inspect.cleandoc(public.__doc__).split("\n\n")[0]
    assert first.endswith(".")
    assert "\n" not in first
    found = sections(public.__doc__)
    if hasattr(public, "_fields"):
        assert re.findall(r"^  (\w+): ", found["Attributes"], re.MULTILINE) == list(public._fields)
        return
    always = ["Args", "Example"] if inspect.isclass(public) else ["Args", "Returns", "Example"]
    assert [heading for heading in found if heading in ("Args", "Returns", "Example")] == always
    assert ">>> " in found["Example"]
    signature = inspect.signature(public)
    documented = re.findall(r"^  \**(\w+): ", found["Args"], re.MULTILINE)
    assert documented == list(signature.parameters)
    annotations = [p.annotation for p in signature.parameters.values()]
    assert inspect.Signature.empty not in [*annotations, signature.return_annotation]


@pytest.mark.slow
def test_what_takes_long_to_import_is_imported_when_it_is_used():
    """Neither the analysis by the core, nor what draws and ranks before something is drawn."""
    program = """
import sys
def show(*names):
    print(*sorted({"matplotlib", "scipy.stats", *names} & set(sys.modules)))
import sam_optax, sam_optax.training
show("matfree", "sam_optax.analysis")
from sam_optax import analysis
show()
analysis.plot_ranks({"sharpness": [1.0, 2.0, 4.0]}, [0.1, 0.3, 0.2])
show()
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines() == ["", "", "matplotlib scipy.stats"]
