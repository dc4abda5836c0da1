"""The options of the methods: ``--sam.rho``, ``--asam.eta``, ...."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from sam_optax.experiments.methods.method import Method
from sam_optax.experiments.methods.registry import METHODS


def _group(name: str, method: Method) -> type:
    """The options of a method: the values to train with, per hyperparameter, or ``None``."""
    fields = [
        (option, tuple[kind, ...] | None, None)  # type: ignore[valid-type]
        for option, (_, _, kind) in method.options.items()
    ]
    return dataclasses.make_dataclass(f"{name.title()}Options", fields, frozen=True)


if TYPE_CHECKING:
    Hyperparameters = Any
else:
    # A group has no help of its own. tyro would look for it in this file, once per group.
    _GROUPS = [
        (
            name,
            Annotated[group := _group(name, method), tyro.conf.arg(help="")],
            dataclasses.field(default_factory=group),
        )
        for name, method in METHODS.items()
        if method.options
    ]
    Hyperparameters = dataclasses.make_dataclass("Hyperparameters", _GROUPS, frozen=True)
