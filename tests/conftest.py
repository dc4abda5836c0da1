"""Configuration of the whole test suite."""

import fnmatch
import gc
import importlib.metadata
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

import pytest


def _quick_compilation() -> list[str]:
    """Flags for the older way to emit code, and for one LLVM module per program.

    Each halves the CPU time of compilation. XLA ends the process at a flag that it does not know:
    only for versions that are known to.
    """
    known = importlib.metadata.version("jaxlib").startswith("0.10.")
    flags = ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
    return flags if known else []


# Before anything initializes the backend: eight devices, so that sharded cases mean something, and
# machine code that is not optimized, since nearly all of the time goes into compiling. (What the
# cost tests count is the program that is handed over to this last stage.)
os.environ["XLA_FLAGS"] = " ".join(
    [
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
        *_quick_compilation(),
        os.environ.get("XLA_FLAGS", ""),
    ]
)
# Workers and subprocesses compile a program once among them.
_cache = None
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _cache = os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="sam_optax-")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def pytest_unconfigure() -> None:
    """The process that made the cache removes it."""
    if _cache is not None:
        shutil.rmtree(_cache, ignore_errors=True)


def _resident_bytes() -> float:
    """Memory of this process, or infinity where nothing says so."""
    try:
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return float("inf")
    return pages * os.sysconf("SC_PAGE_SIZE")


_finished_modules: list[str] = []
_limit: float = 2.5 * 2**30


@pytest.fixture(autouse=True, scope="module")
def _compiled_programs_do_not_pile_up(request: pytest.FixtureRequest) -> Iterator[None]:
    """Thousands of small programs would otherwise stay in memory.

    As seldom as memory allows, since the next modules use many of them again.
    """
    global _limit
    yield
    _finished_modules.append(request.node.name)
    if len(_finished_modules) % 4 == 0 and _resident_bytes() > _limit:
        import jax

        jax.clear_caches()
        gc.collect()
        _limit = max(_limit, _resident_bytes() + 2**29)  # not all of it is given back


def pytest_collection_finish() -> None:
    """Thousands of tests and modules that stay are no work for the garbage collector."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


ROOT = pathlib.Path(__file__).parents[1]


def _is_core(path: pathlib.Path) -> bool:
    """Whether a path is in a package of the core, or in the folder of tests that has its name.

    What lies there imports jax, optax and chex, and skips what needs more.
    """
    top, folder, *_ = (*path.relative_to(ROOT).parts, "", "")
    package = {"sam_optax": folder, "tests": f"_{folder}"}.get(top, "")
    is_package = package.startswith("_") and (ROOT / "sam_optax" / package).is_dir()
    return is_package or (top, folder) == ("tests", "golden")


class _CoreAlone:
    """Does not even import the other files, which may need the extras."""

    @staticmethod
    def pytest_ignore_collect(collection_path: pathlib.Path) -> bool | None:
        above = collection_path in (ROOT, ROOT / "sam_optax", ROOT / "tests")
        return None if above or _is_core(collection_path) else True


def pytest_configure(config: pytest.Config) -> None:
    """``-m core`` and ``-m "core and …"`` collect the core's files alone."""
    if config.option.markexpr.split()[:1] == ["core"]:
        config.pluginmanager.register(_CoreAlone())


CONFORMANCE = pathlib.Path(__file__).parent / "conformance"
# What the cases are that a marker does not name.
OTHERS = {"fast": "slow", "sample": "exhaustive"}


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Cases get the marker ``slow`` or ``exhaustive``: by method, or by the markers above."""
    from methods import FORMULAS, FOUR, KINDS, METHODS, VARIATIONS

    rare = {*KINDS, *FORMULAS, *VARIATIONS} - set(FOUR)
    joined = set(METHODS) - rare - set(FOUR)
    # Shapes and dtypes are where formulas differ.
    formulas = {*KINDS, *FORMULAS}
    usual_by_file = {"test_conformance_dtypes": formulas, "test_conformance_trees": formulas}
    unused: set[tuple[str, str]] = set()
    used: set[tuple[str, str]] = set()
    for item in items:
        if _is_core(item.path):
            item.add_marker("core")
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        name = parameters.get("name")
        if item.path.parent == CONFORMANCE and isinstance(name, str) and name in rare:
            usual = usual_by_file.get(item.path.stem, KINDS)
            item.add_marker("slow" if name in usual else "exhaustive")
        for marker, other in OTHERS.items():
            for mark in item.iter_markers(marker):
                test = item.nodeid.partition("[")[0]
                hits = {p for p in mark.args if fnmatch.fnmatchcase(item.callspec.id, p)}
                used |= {(test, pattern) for pattern in hits}
                unused |= {(test, pattern) for pattern in mark.args}
                if not hits:
                    item.add_marker("slow" if name in joined else other)
        if item.get_closest_marker("exhaustive"):  # -m slow leaves it out
            item.own_markers = [mark for mark in item.own_markers if mark.name != "slow"]
    # Of the whole suite only: who asks for some of the cases gets them without the others.
    whole = config.args == config.getini("testpaths") and not config.getoption("lf", False)
    if whole and unused - used:
        raise pytest.UsageError(f"markers that name no case: {sorted(unused - used)}")
