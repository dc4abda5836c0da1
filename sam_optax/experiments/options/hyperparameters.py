"""The options of the methods: ``--sam.rho``, ``--asam.eta``, ...."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from sam_optax.experiments.methods.method import Method
from sam_optax.experiments.methods.registry import METHODS
from sam_optax.experiments.options.declare import METAVARS, annotated, setting


def _group(name: str, method: Method) -> type:
    """The options of a method: the values to train with, per hyperparameter."""
    fields = []
    for option, (default, help, kind) in method.options.items():
        values: Any = tuple[kind, ...]  # type: ignore[valid-type]
        text = "that of sam_optax" if default is None else ""
        field = setting(default, text=text, metavar=METAVARS.get(kind), help=help)
        fields.append((option, annotated(values | None, field), field))
    title = f"{name.title().replace('_', '')}Options"
    return dataclasses.make_dataclass(title, fields, frozen=True)


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
