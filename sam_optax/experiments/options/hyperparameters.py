"""The options of the methods: ``--sam.rho``, ``--asam.eta``, ...."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

from sam_optax.experiments.methods.registry import METHODS
from sam_optax.experiments.options.declare import setting

if TYPE_CHECKING:
    Hyperparameters = Any
else:
    # One group of options for each line of the table of methods: --sam.rho, --asam.eta, ….
    _GROUPS = {
        name: dataclasses.make_dataclass(
            f"{name.title().replace('_', '')}Options",
            [
                (
                    option,
                    Annotated[
                        tuple[type(value.default), ...] | None,
                        setting(
                            value.help, type(value.default).__name__.upper(), f"{value.default:g}"
                        ),
                    ],
                    dataclasses.field(default=None),
                )
                for option, value in method.options.items()
            ],
            frozen=True,
        )
        for name, method in METHODS.items()
        if method.options
    }
    Hyperparameters = dataclasses.make_dataclass(
        "Hyperparameters",
        [
            (name, group, dataclasses.field(default_factory=group))
            for name, group in _GROUPS.items()
        ],
        frozen=True,
    )
