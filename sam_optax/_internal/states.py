"""Checks that a state belongs to the method that receives it."""

from typing import Any, TypeAlias

import optax

StateType: TypeAlias = type | tuple[Any, ...]
"""The type of a state, or a tuple of types for a plain tuple of states."""


def require(
    name: str, state: optax.OptState, expected: StateType, content: StateType | None = None
) -> None:
    """Raises unless ``state`` has the expected type; ``content`` is shown in the message."""
    if not _is_of(state, expected):
        wanted = _wanted(expected) + (f"({_wanted(content)})" if content else "")
        raise TypeError(
            f"{name} is {_found(state)}, but this method's is {wanted}: it belongs to "
            "another method, or was restored without a target. Restore it into the state that "
            "init returns."
        )


def _is_of(state: optax.OptState, expected: StateType) -> bool:
    if isinstance(expected, tuple):
        return (
            isinstance(state, tuple)
            and len(state) == len(expected)
            and all(map(_is_of, state, expected))
        )
    if expected is optax.EmptyState:
        return isinstance(state, tuple) and len(state) == 0  # () is equivalent
    return isinstance(state, expected)


def _wanted(expected: StateType) -> str:
    if isinstance(expected, tuple):
        return f"({', '.join(map(_wanted, expected))})"
    return expected.__name__


def _found(state: optax.OptState) -> str:
    """The names of the state tuples in a state, such as ``(FullGradientState, EmptyState)``."""
    if not isinstance(state, tuple):
        return type(state).__name__
    name = type(state).__name__ if hasattr(state, "_fields") else ""
    parts = [_found(part) for part in state if isinstance(part, tuple)]
    return f"{name}({', '.join(parts)})" if parts or not name else name
