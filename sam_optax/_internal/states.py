"""Telling the state of one method from that of another."""

from typing import Any


def describe(state: Any) -> str:
    """The names of the state tuples in a state, such as ``(FullGradientState, EmptyState)``."""
    if not isinstance(state, tuple):
        return type(state).__name__
    name = type(state).__name__ if hasattr(state, "_fields") else ""
    parts = [describe(part) for part in state if isinstance(part, tuple)]
    return f"{name}({', '.join(parts)})" if parts or not name else name


def check(name: str, state: Any, expected: str) -> None:
    """Raises unless ``state`` is made of the expected tuples."""
    found = describe(state)
    if found != expected:
        raise TypeError(
            f"{name} is {found}, but this method's is {expected}: it belongs to another method, "
            "or was restored without a target. Restore it into the state that init returns."
        )
