"""Imports go one way: what each folder of the package imports of the others."""

import ast
import graphlib
import pathlib
import re

import pytest

PACKAGE = pathlib.Path(__file__).parents[2] / "sam_optax"
ROLES = ["_perturbations", "_descent", "_gradients", "_schedules"]
# What each folder may import of the package besides itself; "" is `sam_optax`, the public names.
MAY_IMPORT = {
    "_internal": [],
    **{role: ["_internal"] for role in ROLES},
    "_combinators": ["_internal", *ROLES],
    "training": ["", "_internal"],
    "analysis": ["", "_internal"],
    "experiments": ["", "analysis", "training"],
}


def imported(source, package):
    """The modules of ours that ``source``, a file of ``package``, imports anywhere in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            start = ".".join([*above, *filter(None, [node.module])])
            # (The imported name may be a module itself.)
            names = [f"{start}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "sam_optax":
                yield name


def folder_of(name):
    """The folder that an imported name lies in; "" where it is a public name of the package."""
    _, *parts = name.split(".")
    return parts[0] if parts and (PACKAGE / parts[0]).is_dir() else ""


def is_private(name):
    """Whether a part of the name says that it is not for others."""
    return any(p.startswith("_") and not p.endswith("__") for p in name.split(".")[1:])


def violations(folder, source, package):
    """What a file of ``folder`` imports and may not."""
    for name in imported(source, package):
        where = folder_of(name)
        if where == folder:
            continue
        if where not in MAY_IMPORT[folder] or (is_private(name) and not where.startswith("_")):
            yield f"imports {name}"


def found(folder):
    """The folder's violations, each with its file."""
    for path in sorted((PACKAGE / folder).rglob("*.py")):
        package = ".".join(["sam_optax", *path.parent.relative_to(PACKAGE).parts])
        for violation in violations(folder, path.read_text(), package):
            yield f"{path.relative_to(PACKAGE).as_posix()} {violation}"


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_go_one_way(folder):
    assert list((PACKAGE / folder).rglob("*.py"))
    assert sorted(set(found(folder))) == []


def test_every_folder_has_its_rule_and_there_are_no_flat_modules():
    folders = {path.name for path in PACKAGE.iterdir() if any(path.rglob("*.py"))}
    assert folders == set(MAY_IMPORT)
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py"}


@pytest.mark.parametrize(
    ("folder", "line", "refused"),
    [
        ("_internal", "from . import trees", False),
        ("_internal", "from ..training import TrainState", True),
        ("_internal", "import jax, sam_optax._schedules.when", True),
        ("_internal", "def f():\n    from sam_optax import sam", True),
        ("_descent", "from sam_optax._internal.trees import map_inexact", False),
        ("_descent", "from sam_optax._gradients.accumulate import accumulate", True),
        ("experiments", "from sam_optax.analysis import sharpness", False),
        ("experiments", "from sam_optax.analysis._sharpness import sharpness", True),
        ("experiments", "from sam_optax import __version__", False),
        ("experiments", "import sam_optax_extra._internal", False),
    ],
)
def test_a_violation_is_found(folder, line, refused):
    """A control of the rules above, on lines that nobody wrote."""
    assert bool(list(violations(folder, line, f"sam_optax.{folder}"))) == refused


LOOKS_INTO_CODE = re.compile(
    r"\bimport dis\b|__code__|co_consts|co_names|__closure__|cell_contents|getsource|currentframe"
    r"|\binspect\.(?!signature)|inspect\.signature"
)


def test_no_code_is_inspected_to_decide_what_a_step_computes():
    """But for the arguments of ``value_fn``, which optax takes from the signature too."""
    core = [path for path in PACKAGE.rglob("*.py") if path.parent.name.startswith("_")]
    hits = [(path.name, hit) for path in core for hit in LOOKS_INTO_CODE.findall(path.read_text())]
    assert hits == [("gradient_functions.py", "inspect.signature")]


def test_the_experiments_import_in_no_circle():
    """Not even within functions, or for types."""
    files = {path: path.relative_to(PACKAGE.parent) for path in PACKAGE.glob("experiments/**/*.py")}
    names = {path: ".".join(of.with_suffix("").parts) for path, of in files.items()}
    graph = {}
    for path, name in names.items():
        found = imported(path.read_text(), name.rpartition(".")[0])
        modules = {of if of in names.values() else of.rpartition(".")[0] for of in found}
        graph[name] = modules & set(names.values())
    order = [*graphlib.TopologicalSorter(graph).static_order()]  # raises for a circle
    assert order.index("sam_optax.experiments.errors") < len(order) / 2
