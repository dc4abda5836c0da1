"""Experiments on the library's public API: the command, and its functions for Python.

It is not imported by ``import sam_optax``, and needs ``pip install "sam_optax[experiments]"``.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sam_optax.experiments.call import compare as compare
    from sam_optax.experiments.finished import open_run as open_run
    from sam_optax.experiments.methods.method import Base as Base
    from sam_optax.experiments.methods.method import Step as Step
    from sam_optax.experiments.methods.method import method as method
    from sam_optax.experiments.reporting.table import Result as Result

__all__ = ["Base", "Result", "Step", "compare", "method", "open_run"]

_MODULES = {"compare": "call", "open_run": "finished", "Result": "reporting.table"}
_MODULES |= dict.fromkeys(("Base", "Step", "method"), "methods.method")


def __getattr__(name: str) -> Any:
    """Imports what needs the extra when it is used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
