"""Type aliases for pytrees of arrays, which Python's types cannot express."""

from typing import Any, TypeAlias

PyTree: TypeAlias = Any
"""Any pytree, with arrays as leaves."""

Leaf: TypeAlias = Any
"""A leaf of a tree: an array, a Python number, or ``None``."""
