"""Configuration of the whole test suite."""

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


@pytest.fixture(autouse=True, scope="module")
def _compiled_programs_do_not_pile_up() -> Iterator[None]:
    """Thousands of small programs would otherwise stay in memory.

    As seldom as memory allows, since the next modules use many of them again.
    """
    yield
    statm = pathlib.Path("/proc/self/statm")  # of Linux
    pages = int(statm.read_text().split()[1]) if statm.exists() else 0
    if pages and pages * os.sysconf("SC_PAGE_SIZE") > 3 * 2**30:
        import jax

        jax.clear_caches()
        gc.collect()


def pytest_collection_finish() -> None:
    """Thousands of tests and modules that stay are no work for the garbage collector."""
    gc.collect()
    gc.freeze()
