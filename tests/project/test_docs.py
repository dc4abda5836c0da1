"""The documentation builds without warnings, is complete, and what it says runs."""

import doctest
import importlib
import importlib.util
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest

import sam_optax
from sam_optax.experiments.entry import main

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))
PACKAGES = ["sam_optax", "sam_optax.training", "sam_optax.analysis"]
BUILDERS = ("sphinx", "furo", "myst_nb")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built pages; a warning of the build is an error."""
    missing = [name for name in BUILDERS if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"building the documentation needs {', '.join(missing)}: pip install '.[docs]'")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    result = subprocess.run(
        [*command, "-d", str(out / "doctrees"), str(DOCS), str(out / "html")],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stderr
    return out / "html"


@pytest.mark.slow
def test_every_page_is_built_and_reachable(site):
    index = (site / "index.html").read_text()
    for page in PAGES:
        html = page.replace(".md", ".html")
        assert (site / html).is_file()
        assert page == "index.md" or f'href="{html}"' in index


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.slow
def test_every_public_name_is_in_the_reference(site, package):
    reference = "".join(path.read_text() for path in site.glob("reference/**/*.html"))
    documented = set(re.findall(r'<dt class="sig[^>]* id="([\w.]+)"', reference))
    names = importlib.import_module(package).__all__
    assert {f"{package}.{name}" for name in names} <= documented


@pytest.mark.slow
def test_pages_need_no_network(site):
    """Equations are MathML, and all styles and scripts are the site's."""
    for page in site.rglob("*.html"):
        assert not re.search(r"<(script|link|img)[^>]* (src|href)=.https?:", page.read_text()), page
    assert "<msub>" in (site / "methods.html").read_text()


@pytest.mark.slow
def test_every_notebook_is_a_page_with_its_outputs(site):
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        page = (site / "notebooks" / f"{path.stem}.html").read_text()
        assert "device(s), jax" in page
        assert "cell_output" in page
    sections = re.findall(
        r'href="notebooks/(\w+)\.html#([^"]+)"', (site / "notebooks.html").read_text()
    )
    assert len(sections) >= 20
    for name, section in sections:
        assert f'id="{section}"' in (site / "notebooks" / f"{name}.html").read_text()


# The skeleton of a method has its own test below.
WITH_EXAMPLES = [
    page for page in PAGES if page != "CONTRIBUTING.md" and ">>> " in (DOCS / page).read_text()
]


class Accuracies(doctest.OutputChecker):
    """Those of training runs differ from machine to machine, by a few hundredths."""

    def check_output(self, want, got, optionflags):
        number = r"\b0\.\d+$|\b0\.\d\d\b(?= on)"
        pairs = zip(re.findall(number, want, re.M), re.findall(number, got, re.M), strict=True)
        near = all(abs(float(a) - float(b)) <= 0.05 for a, b in pairs)
        want, got = (re.sub(number, "0", text, flags=re.M) for text in (want, got))
        return near and super().check_output(want, got, optionflags)


@pytest.mark.parametrize("page", WITH_EXAMPLES)
@pytest.mark.slow
def test_examples_run(page):
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    path = DOCS / page
    test = doctest.DocTestParser().get_doctest(path.read_text(), {}, page, str(path), 0)
    report = []
    checker = Accuracies() if page == "tutorial.md" else None
    runner = doctest.DocTestRunner(checker, optionflags=flags)
    result = runner.run(test, out=report.append)
    assert result.attempted > 0
    assert result.failed == 0, "".join(report)


@pytest.mark.slow
def test_the_example_on_text_runs(capsys):
    """In three steps on little text; the page shows a line for each of its optimizers."""
    code = (ROOT / "notebooks" / "transformer.py").read_text()
    smaller = {"64, 16, 1000": "8, 4, 3", "[:20_000]": "[:600]", "[-60_000:]": "[-600:]"}
    for whole, small in {**smaller, "width: int = 64": "width: int = 8"}.items():
        assert whole in code
        code = code.replace(whole, small)
    exec(compile(code, "transformer.py", "exec"), {"__name__": "page"})
    line = re.compile(r"^(.+?) +training (\d\.\d+)  test (\d\.\d+) nats per byte$", re.MULTILINE)
    found = {name: numbers for name, *numbers in line.findall(capsys.readouterr().out)}
    assert list(found) == [name for name, *_ in line.findall((DOCS / "notebooks.md").read_text())]
    assert len({tuple(numbers) for numbers in found.values()}) == 4


def words(text):
    """Those with a letter or a digit, code and tables included."""
    return [word for word in text.split() if re.search(r"\w", word)]


def test_there_are_few_pages_and_none_is_long():
    """The list of all methods is looked up, not read."""
    assert len(PAGES) <= 16
    long = {page: len(words((DOCS / page).read_text())) for page in PAGES if page != "methods.md"}
    assert max(long.values()) <= 2000, long


@pytest.mark.parametrize("framework", ["Flax Linen", "Flax NNX", "Equinox"])
def test_steps_of_frameworks_are_whole(framework):
    """As README and index say: with dropout, BatchNorm and an auxiliary output. They run below."""
    sections = (DOCS / "frameworks.md").read_text().split("\n## ")
    (section,) = [section for section in sections if section.startswith(framework)]
    for part in ("BatchNorm(", "Dropout(", "has_aux=True", "losses[-1] < 0.5 * losses[0]"):
        assert part in section, part


def heading_anchors(path):
    """As GitHub and the site make them."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md", *(f"docs/{page}" for page in PAGES)])
def test_links_lead_somewhere(page):
    """Their targets are files, and what follows # is a heading of the page."""
    path = ROOT / page
    code = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
    for target in re.findall(r"\]\(([^):]+)\)", code.sub("``", path.read_text())):
        name, _, anchor = target.partition("#")
        linked = path.parent / name if name else path
        assert linked.is_file(), target
        assert not anchor or anchor in heading_anchors(linked), target


def test_counts_of_methods_in_the_readme():
    """Rows by name, papers that they link, and rows that follow their authors' code."""
    table = (DOCS / "methods.md").read_text().split("## By name")[1]
    rows = [
        row for row in re.findall(r"^\| .*`.*$", table, re.MULTILINE) if "| method |" not in row
    ]
    papers = {link for row in rows for link in re.findall(r"\((https://[^)]+)\)", row)}
    exact = [row for row in rows if ": exact" in row]
    readme = (ROOT / "README.md").read_text()
    assert f"{len(rows)} variants of the methods of {len(papers)} papers" in readme
    assert f"{len(exact)} variants follow recorded steps" in readme


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{page}" for page in PAGES)])
@pytest.mark.slow
def test_commands_are_understood(page, tmp_path, monkeypatch):
    """Every ``compare`` of a block, whose settings ``--dry-run`` resolves without its data."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notebooks").symlink_to(ROOT / "notebooks")
    text = (ROOT / page).read_text()
    for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", text, re.DOTALL):
        (tmp_path / name).write_text(code)
    blocks = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    for line in lines:
        if found := re.match(r" *python -m sam_optax (compare.*)", line):
            assert main([*shlex.split(found[1], comments=True), "--dry-run"]) == 0, line


@pytest.mark.slow
def test_the_table_of_the_readme_is_that_of_the_command():
    """Its columns and their explanations, of which a wide terminal has more; not its numbers."""
    (block,) = re.findall(r"```text\n(digits: .*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    run = [sys.executable, "-m", "sam_optax", "compare", "--methods", "sgd", "sam", "--epochs", "1"]
    out = subprocess.run(
        [*run, "--seeds", "2"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "160"},
    )
    assert out.returncode == 0, out.stderr

    def columns(text):
        (heading,) = re.findall(r"^ +accuracy .*$", text, re.MULTILINE)
        return re.split(r"  +", heading.strip()), re.findall(r"^(\S[^:\n]*): {2,}\S", text, re.M)

    for shown, printed in zip(columns(block), columns(out.stdout), strict=True):
        assert shown
        assert [name for name in printed if name in shown] == [
            name for name in shown if name != "not shown"
        ]


@pytest.mark.parametrize("page", [*PAGES, "reference/index.rst"])
def test_pages_say_first_whom_they_are_for(page):
    first = (DOCS / page).read_text().split("\n\n")[1]
    assert re.search(r"\b[Ff]or (those|readers|anyone)\b", first), first


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CONTRIBUTING.md"])
def test_code_is_as_wide_as_a_page(page):
    """The contributing page has files of the repository, which are wider."""
    for block in re.findall(r"^ *```\w+\n(.*?)^ *```", (DOCS / page).read_text(), re.M | re.S):
        assert max(map(len, block.splitlines())) <= 88, block


def test_the_example_of_the_readme_learns(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert max(map(len, code.splitlines())) <= 88
    exec(compile(code, "README.md", "exec"), {})
    assert float(capsys.readouterr().out) < 0.1


def test_readers_see_no_address_that_is_not_known():
    """It is named in pyproject.toml alone, so nothing here can disagree with it."""
    pages = [ROOT / "README.md", *DOCS.rglob("*.md"), *(ROOT / "notebooks").glob("*.ipynb")]
    for path in pages:
        assert not re.search(r"\bOWNER\b|github\.com/[\w.-]+/sam_optax", path.read_text()), path


@pytest.mark.slow
def test_the_figure_on_the_front_page_is_drawn_from_results(tmp_path):
    def results(*methods):
        seeds = [{"curves": {"test_accuracy": [a, 0.9]}, "test_accuracy": 0.9} for a in (0.5, 0.6)]
        found = [
            {
                "name": name,
                "method": name,
                "seeds": [{**run, "diverged": False} for run in seeds],
                "step_cost": 1.0,
                "hyperparameters": {"rho": 0.5},
                "summary": {"test_accuracy": {"mean": 0.9, "std": 0.0, "interval": 0.01}},
            }
            for name in methods
        ]
        return json.dumps({"methods": found})

    (tmp_path / "results.json").write_text(results("sgd", "rsam", "part"))
    figure = tmp_path / "overview.png"
    script = [sys.executable, str(DOCS / "images" / "overview.py")]
    subprocess.run([*script, tmp_path, figure], check=True)
    assert figure.read_bytes().startswith(b"\x89PNG")
    for path in (DOCS / "images").glob("*.png"):
        assert path.stat().st_size < 100_000


def test_the_citation_has_this_version():
    yaml = pytest.importorskip("yaml", reason="reading CITATION.cff needs pyyaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == sam_optax.__version__
    assert {"cff-version", "message", "title", "authors", "license"} <= set(citation)


METHOD = "sam_optax/_perturbations/layerwise_sam.py"
ITS_TESTS = "tests/perturbations/test_layerwise_sam.py"


@pytest.fixture
def skeleton(tmp_path):
    """A copy of the repository in which the contributing page has been followed."""
    text = (DOCS / "CONTRIBUTING.md").read_text()
    blocks = dict(re.findall(r"<!-- skeleton: (\S+) -->\n```\w+\n(.*?)```", text, re.DOTALL))
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "sam_optax", tmp_path / "sam_optax", ignore=ignored)
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)

    def insert(name, before, line):
        path = tmp_path / name
        before, found, after = path.read_text().partition(before)
        assert found
        path.write_text(before + line + found + after)

    insert(
        "sam_optax/__init__.py",
        "from sam_optax._perturbations.limit_rise ",
        blocks.pop("sam_optax/__init__.py"),
    )
    insert("sam_optax/__init__.py", '    "low_pass",\n', '    "layerwise_sam",\n')
    insert("tests/methods.py", '    "by_hand":', blocks.pop("tests/methods.py"))
    for name, block in blocks.items():
        (tmp_path / name).write_text(block)
    return tmp_path


@pytest.mark.slow
def test_the_skeleton_of_a_method_passes(skeleton):
    """Its own tests, the docstring's example, the public names and the whole conformance."""
    files = [METHOD, ITS_TESTS, "tests/project/test_public_api.py"]
    files += ["tests/conformance/test_conformance.py"]
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "--confcutdir=tests", "-m", ""]
    options += ["-k", "layerwise_sam"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        capture_output=True,
        text=True,
        cwd=skeleton,
        env={**os.environ, "PYTHONPATH": str(skeleton)},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    passed = int(re.search(r"(\d+) passed", result.stdout)[1])
    assert passed >= 20  # its own, and one of each kind


@pytest.mark.skipif(
    importlib.util.find_spec("ruff") is None, reason="linting the skeleton needs ruff"
)
@pytest.mark.parametrize("command", [["check"], ["format", "--check", "--diff"]], ids=" ".join)
def test_the_skeleton_of_a_method_is_clean(skeleton, command):
    files = [METHOD, "sam_optax/__init__.py", ITS_TESTS, "tests/methods.py"]
    result = subprocess.run(
        [sys.executable, "-m", "ruff", *command, "--no-cache", *files],
        capture_output=True,
        text=True,
        cwd=skeleton,
    )
    assert result.returncode == 0, result.stdout + result.stderr
