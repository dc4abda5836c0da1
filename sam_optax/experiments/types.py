"""Type aliases for pytrees and for plain data, which Python's types cannot express."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

PyTree: TypeAlias = Any
"""Any pytree, with arrays as leaves."""

Json: TypeAlias = Mapping[str, Any]
"""Plain data by name, as in ``results.json``: settings, a method, or all results."""

Record: TypeAlias = dict[str, Any]
"""The same while it is being filled."""

Function: TypeAlias = Callable[..., Any]
"""A function with any signature."""
