"""The suite in full is slow: of its methods, one of each kind and formula is for every day."""

import pathlib

import pytest
from methods import FORMULAS, KINDS, METHODS

HERE = pathlib.Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their markers
def pytest_collection_modifyitems(items):
    rare = set(METHODS) - {*KINDS, *FORMULAS}
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if item.path.parent == HERE and parameters.get("name") in rare:
            item.add_marker(pytest.mark.slow)
