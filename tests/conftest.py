"""Configuration of the whole test suite."""

import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

import pytest

# Before anything initializes the backend: eight devices, so that sharded cases mean something, and
# machine code that is not optimized, since nearly all of the time goes into compiling. (What the
# cost tests count is the program that is handed over to this last stage.)
os.environ["XLA_FLAGS"] = " ".join(
    [
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
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


_finished_modules: list[str] = []


@pytest.fixture(autouse=True, scope="module")
def _compiled_programs_do_not_pile_up(request: pytest.FixtureRequest) -> Iterator[None]:
    """Thousands of small programs would otherwise stay in memory: gigabytes for the suite.

    Not after every module, since the next ones use many of them again.
    """
    yield
    _finished_modules.append(request.node.name)
    if len(_finished_modules) % 4 == 0:
        import jax

        jax.clear_caches()


CONFORMANCE = pathlib.Path(__file__).parent / "conformance"


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The suite of all methods is slow: one of each kind and formula is for every day."""
    from methods import FORMULAS, KINDS, METHODS

    rare = set(METHODS) - {*KINDS, *FORMULAS}
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if item.path.parent == CONFORMANCE and parameters.get("name") in rare:
            item.add_marker(pytest.mark.slow)
