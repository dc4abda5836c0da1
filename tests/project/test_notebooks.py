"""Every notebook runs from top to bottom; what is stored of it is fit to be read and opened."""

import base64
import os
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


# Shorter trainings and coarser curves for the tests: what is written, and what runs in its place.
SHORTER = {
    "family": {"steps=1500": "steps=100"},
    "fine_tuning": {"STEPS = 300": "STEPS = 20", "keys[3], 300": "keys[3], 20"},
    "flatness": {
        "epochs=80": "epochs=4",
        "[0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0]": "[0.1, 0.5]",
        "np.linspace(-1, 1, 41)": "np.linspace(-1, 1, 9)",
        "np.linspace(-1, 1, 15)": "np.linspace(-1, 1, 5)",
    },
    "own_method": {"steps=600": "steps=30", "range(3)": "range(2)"},
    "quickstart": {
        "epochs=60": "epochs=3",
        "60 * (len": "3 * (len",
        "np.arange(1, 61)": "np.arange(1, 4)",
    },
    "your_network": {"epochs=30": "epochs=2", "trials=9": "trials=3"},
}


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook):
    return [output for cell in code_cells(notebook) for output in cell.outputs]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the notebook machinery
@every_notebook
@pytest.mark.slow
def test_notebook_runs(path, tmp_path, monkeypatch):
    """Outside a clone, on eight devices. Nothing is written to stderr: no warnings."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(path, as_version=4)
    for written, shorter in SHORTER.get(path.stem, {}).items():
        assert any(written in cell.source for cell in code_cells(notebook)), written
        for cell in code_cells(notebook):
            cell.source = cell.source.replace(written, shorter)
    place = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=180, kernel_name="python3", resources=place).execute()
    assert outputs(notebook)
    stderr = [output.text for output in outputs(notebook) if output.get("name") == "stderr"]
    assert not stderr


@every_notebook
def test_what_is_stored(path):
    """The run that is stored is whole, in order, small, and says nothing of where it ran."""
    notebook = nbformat.read(path, as_version=4)
    counts = [cell.execution_count for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1))
    assert {output.output_type for output in outputs(notebook)} <= {
        "stream",
        "display_data",
        "execute_result",
    }
    assert all(output.get("name") != "stderr" for output in outputs(notebook))
    text = path.read_text()
    assert len(text) < 400_000
    assert not re.search(r"/(home|root|work|tmp|Users|usr)/|<\w+ at 0x", text)
    images = [o.data["image/png"] for o in outputs(notebook) if "image/png" in o.get("data", {})]
    assert all(base64.b64decode(image).startswith(b"\x89PNG") for image in images)


@every_notebook
def test_starts_anywhere(path, monkeypatch):
    """A title first, and a first code cell that installs what is missing and names the device."""
    notebook = nbformat.read(path, as_version=4)
    title, install = notebook.cells[0], code_cells(notebook)[0]
    assert re.match(r"# \S.*\n\nFor those who ", title.source)
    found = re.search(
        r'except ImportError:\n(.*)    %pip install -q "{PACKAGE}"', install.source, re.S
    )
    choice = "import os\n" + textwrap.dedent(found[1])
    for folder, package in ((path.parent, "..[experiments]"), (ROOT, "sam_optax[experiments]")):
        monkeypatch.chdir(folder)
        exec(choice, names := {})
        assert names["PACKAGE"] == package
    (stream,) = install.outputs
    assert re.fullmatch(r"\d+ (CPU|GPU|TPU) device\(s\), jax [\d.]+\n", stream.text)
    # Simulated devices are those of a CPU; the others ask Colab for a GPU.
    simulated = "xla_force_host_platform_device_count" in install.source
    assert notebook.metadata.get("accelerator") == (None if simulated else "GPU")


@every_notebook
def test_code_is_as_wide_as_a_page(path):
    for cell in code_cells(nbformat.read(path, as_version=4)):
        assert max(map(len, cell.source.splitlines())) <= 88, cell.source


def test_every_notebook_is_listed():
    page = (ROOT / "docs" / "notebooks.md").read_text().split("## By task")[0]
    named = set(re.findall(r"notebooks/(\w+\.ipynb)\)", page))
    assert named == {path.name for path in NOTEBOOKS}


@pytest.mark.slow
def test_the_method_of_the_notebook_conforms(tmp_path):
    """The cell that defines it, in the conformance suite: the claim that the notebook makes."""
    notebook = nbformat.read(ROOT / "notebooks" / "own_method.ipynb", as_version=4)
    (cell,) = [c for c in code_cells(notebook) if c.source.startswith("def leaf_asam(")]
    assert len(cell.source.splitlines()) <= 20
    shutil.copytree(
        ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    methods = tmp_path / "tests" / "methods.py"
    before, start, after = methods.read_text().partition("METHODS: dict")
    line = '    "leaf_asam": leaf_asam,\n'
    after = after.replace('    "by_hand":', line + '    "by_hand":', 1)
    after = after.replace('KINDS = ["sam",', 'KINDS = ["leaf_asam", "sam",', 1)
    source = f"import jax.numpy as jnp\n\n\n{cell.source}\n\n\n"
    methods.write_text(before + source + start + after)

    options = ["-q", "-p", "no:cacheprovider", "--confcutdir=tests", "-k", "leaf_asam"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-m", "slow or not slow", "tests/conformance"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) >= 25
