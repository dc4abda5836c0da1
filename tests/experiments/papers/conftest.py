"""Small things that the tests of the papers' experiments share."""

import jax
import pytest


@pytest.fixture(autouse=True)
def _compile_fast():
    """The programs are tiny and run a few times: optimizing them takes longer than running."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
