"""Names for what Python's types cannot say about trees of arrays."""

from typing import Any, TypeAlias

PyTree: TypeAlias = Any
"""Any nesting of containers that JAX knows, with arrays as leaves."""

Leaf: TypeAlias = Any
"""A leaf of a tree: an array, a Python number, or ``None``."""
