"""Configuration of the whole test suite."""

import os
import pathlib
from collections.abc import Iterator

import pytest

# Eight devices, so that sharded cases mean something; before anything initializes the backend.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)


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
