"""Runs the examples in the docstrings of packages, without pytest: ``examples.py PACKAGE...``."""

import doctest
import importlib
import pkgutil
import sys

FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
attempted = 0
for name in sys.argv[1:]:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, f"{name}."):
        failed, tried = doctest.testmod(importlib.import_module(module.name), optionflags=FLAGS)
        attempted += tried
        if failed:
            sys.exit(1)
print(f"{attempted} lines of examples ran")
sys.exit(not attempted)
