"""The public names: each documented, none private, and a light import."""

import inspect
import itertools
import pathlib
import re
import subprocess
import sys

import pytest
from helpers import sections

import sam_optax

PUBLIC = sam_optax.__all__
FUNCTIONS = [name for name in PUBLIC if inspect.isfunction(getattr(sam_optax, name))]
STATES = [name for name in PUBLIC if name.endswith("State")]


def groups():
    """The names in ``__all__`` under each of its comments."""
    source = pathlib.Path(sam_optax.__file__).read_text()
    _, _, listed = source.partition("__all__ = [")
    _, *texts = re.split(r"^    # .+\.$", listed, flags=re.MULTILINE)
    return [re.findall(r'"(\w+)"', text) for text in texts]


def test_all_is_sorted_by_role_and_complete():
    assert list(itertools.chain(*groups())) == PUBLIC
    assert len(groups()) == 7
    for names in groups():
        assert names == sorted(names)
    assert len(set(PUBLIC)) == len(PUBLIC)
    visible = {name for name in vars(sam_optax) if not name.startswith("_")}
    modules = {name for name in visible if inspect.ismodule(getattr(sam_optax, name))}
    assert visible - modules == set(PUBLIC)


def test_each_role_has_a_page_of_the_reference():
    """The reference groups the names as ``__all__`` does, each of them once."""
    reference = pathlib.Path(__file__).parents[2] / "docs" / "reference"
    _, toctree, _ = (reference / "index.rst").read_text().split(".. toctree::")
    pages = re.findall(r"^   (\w+)$", toctree, flags=re.MULTILINE)
    listed = [
        re.findall(r"^\.\. auto(?:function|class):: (\w+)$", text, flags=re.MULTILINE)
        for text in ((reference / f"{page}.rst").read_text() for page in pages)
    ]
    assert [sorted(names) for names in listed] == groups()


@pytest.mark.parametrize("name", PUBLIC)
def test_public_objects_live_in_private_modules_and_say_what_they_are(name):
    """So that there is one way to import each; the docstring starts with one sentence."""
    module = getattr(sam_optax, name).__module__
    assert module.startswith("sam_optax._") or (module, name) == ("sam_optax", "Perturbation")
    first = inspect.cleandoc(getattr(sam_optax, name).__doc__).split("\n\n")[0]
    assert first.endswith(".")
    assert "\n" not in first


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstring_and_annotations_are_complete(name):
    signature = inspect.signature(getattr(sam_optax, name))
    found = sections(getattr(sam_optax, name).__doc__)
    # What raises nothing, or takes nothing, has nothing to say about it.
    expected = ["Args"] * bool(signature.parameters) + ["Returns"]
    expected += ["Raises"] * ("Raises" in found) + ["Example"]
    assert [heading for heading in found if heading in expected] == expected
    assert ">>> " in found["Example"]
    documented = re.findall(r"^  \**(\w+): ", found.get("Args", ""), flags=re.MULTILINE)
    assert documented == list(signature.parameters)
    assert signature.return_annotation is not inspect.Signature.empty
    for parameter in signature.parameters.values():
        assert parameter.annotation is not inspect.Parameter.empty, parameter


@pytest.mark.parametrize("name", STATES)
def test_every_field_of_a_state_is_documented(name):
    state = getattr(sam_optax, name)
    attributes = sections(state.__doc__)["Attributes"]
    documented = re.findall(r"^  (\w+): ", attributes, flags=re.MULTILINE)
    assert documented == list(state._fields)


def test_import_is_light():
    """Beyond jax, optax and chex, importing the library loads nothing but its own core."""
    program = """
import sys
import chex, jax, optax
before = set(sys.modules)
import sam_optax
added = {name.split(".")[0] for name in set(sys.modules) - before}
print(*sorted(added - set(sys.stdlib_module_names)))
print(*sorted(name for name in sys.modules if name.startswith("sam_optax.")))
heavy = {"flax", "matplotlib", "sklearn", "pandas", "haiku", "equinox", "rich", "tyro", "mlxtend"}
print(*sorted(heavy & set(sys.modules)))
"""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True
    )
    added, submodules, heavy = result.stdout.splitlines()
    assert added.split() == ["sam_optax"]
    assert "sam_optax.experiments" not in submodules.split()
    assert all(name.startswith("sam_optax._") for name in submodules.split())
    assert heavy == ""


@pytest.mark.parametrize(
    "name",
    ["sam", "asam", "fsam", "rsam", "remove_full_gradient", "random_start", "sharpness_aware"],
)
def test_options_are_keyword_only(name):
    """All but the papers' own hyperparameters have to be named by the caller."""
    parameters = list(inspect.signature(getattr(sam_optax, name)).parameters.values())
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    papers = {"rho", "eta", "sigma", "lmbda", "gamma"}
    assert set(positional) <= papers | {"base_tx", "perturbation"}
    assert len(positional) < len(parameters)
