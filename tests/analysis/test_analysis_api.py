"""The public names of the analysis: documented as those of the core, and kept out of it."""

import inspect
import re
import subprocess
import sys

import pytest
from helpers import sections

from sam_optax import analysis

PUBLIC = analysis.__all__
FUNCTIONS = [name for name in PUBLIC if inspect.isfunction(getattr(analysis, name))]
RESULTS = [name for name in PUBLIC if hasattr(getattr(analysis, name), "_fields")]


def test_all_is_sorted_and_complete():
    assert sorted(PUBLIC) == PUBLIC
    visible = {name for name in vars(analysis) if not name.startswith("_")}
    assert visible == set(PUBLIC)
    assert len(FUNCTIONS) + len(RESULTS) + len(["DatasetLoss"]) == len(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_docstring_starts_with_one_sentence(name):
    assert getattr(analysis, name).__module__.startswith("sam_optax.analysis._")
    first = inspect.cleandoc(getattr(analysis, name).__doc__).split("\n\n")[0]
    assert first.endswith(".")
    assert "\n" not in first


@pytest.mark.parametrize("name", [*FUNCTIONS, "DatasetLoss"])
def test_docstrings_are_complete(name):
    function = getattr(analysis, name)
    found = sections(function.__doc__)
    order = [h for h in found if h in ("Args", "Returns", "Raises", "Example", "References")]
    always = ["Args", "Example"] if inspect.isclass(function) else ["Args", "Returns", "Example"]
    assert [h for h in order if h not in ("Raises", "References")] == always
    assert ">>> " in found["Example"]
    signature = inspect.signature(function)
    documented = re.findall(r"^  \**(\w+): ", found["Args"], flags=re.MULTILINE)
    assert documented == list(signature.parameters)
    for parameter in signature.parameters.values():
        assert parameter.annotation is not inspect.Parameter.empty, parameter
    assert signature.return_annotation is not inspect.Signature.empty


@pytest.mark.parametrize("name", RESULTS)
def test_every_field_of_a_result_is_documented(name):
    result = getattr(analysis, name)
    attributes = sections(result.__doc__)["Attributes"]
    assert re.findall(r"^  (\w+): ", attributes, flags=re.MULTILINE) == list(result._fields)


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
