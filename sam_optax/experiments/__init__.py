"""Experiments on the library's public API: the command, and :func:`compare` for Python.

It is not imported by ``import sam_optax``, and needs ``pip install "sam_optax[experiments]"``.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sam_optax.experiments.call import compare as compare
    from sam_optax.experiments.result import Result as Result

__all__ = ["Result", "compare"]


def __getattr__(name: str) -> Any:
    """Imports what needs the extra when it is used."""
    if name == "compare":
        from sam_optax.experiments.call import compare

        return compare
    if name == "Result":
        from sam_optax.experiments.result import Result

        return Result
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
