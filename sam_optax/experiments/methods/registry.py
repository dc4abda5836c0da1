# ruff: noqa: RUF001 (the papers' Greek letters, in help texts)
"""The methods of the experiments, by name; a new one is a function in one of the files below.

Its parameters after the base optimizer are the hyperparameters, with their defaults.
These were chosen on digits with 40 % wrong training labels by ``compare --tune``.
"""

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

import optax

from sam_optax.experiments.methods.method import Arguments, Method, Option

METHODS: dict[str, Method] = {}
DEFAULT = ("sgd", "sam", "asam", "rsam", "fsam")
_HELP = {
    "rho": "Radius ρ of the perturbation.",
    "eta": "η, added to |w| in the normalization operator.",
    "sigma": "Share σ of the full gradient that is removed.",
    "lmbda": "Decay λ of the average that estimates the full gradient.",
    "alpha": "Weight α of the surrogate gap's gradient.",
    "gamma": "The weight of the sharpness is γ/(1 − γ).",
    "sparsity": "Share of the params that is not perturbed.",
    "every": "Number of perturbations between choices of the mask.",
    "k": "Period of the SAM steps.",
    "lr": "Learning rate of the method's own base optimizer, relative to --lr.",
}

Build = Callable[..., optax.GradientTransformation]


def method(
    title: str,
    help: Mapping[str, str] | None = None,
    *,
    gradients: float | Callable[..., float] = 2.0,
    arguments: Callable[..., Arguments] | None = None,
    groups: bool = True,
    radius: tuple[str, ...] = ("rho",),
    **flags: Any,
) -> Callable[[Build], Build]:
    """Registers ``build(base, **hyperparameters)`` by its name; see :class:`Method`.

    ``help`` says of hyperparameters what they are, where others of the name are something else.
    What a method adds to the arguments of ``update`` is of the whole batch: it has no ``groups``.
    """
    texts = {**_HELP, **(help or {})}

    def register(build: Build) -> Build:
        _, *parameters = inspect.signature(build).parameters.values()
        options = {p.name: Option(p.default, texts[p.name], _kind(p)) for p in parameters}
        found = Method(
            title,
            build,
            options,
            gradients=gradients,
            arguments=arguments,
            groups=groups and arguments is None,
            radius=radius,
            **flags,
        )
        METHODS[build.__name__] = found
        return build

    return register


def _kind(parameter: inspect.Parameter) -> type:
    """The type of a hyperparameter: its annotation, where it may be left out the other one."""
    given = typing.get_args(parameter.annotation) or (parameter.annotation,)
    return next(kind for kind in given if kind is not type(None))


# They register themselves, in the order in which they are listed.
from sam_optax.experiments.methods import family, cheap, catalogue  # noqa: E402, F401, I001
