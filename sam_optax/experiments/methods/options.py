# ruff: noqa: RUF001 (the papers' Greek letters, in help texts)
"""How the registry writes the hyperparameters of its methods."""

import functools
from typing import Any

from sam_optax.experiments.methods import builders as build
from sam_optax.experiments.methods.method import Method, Option

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


def options(**values: Any) -> dict[str, Option]:
    """Hyperparameters: a default, or a default and what it is."""
    pairs = {k: v if isinstance(v, tuple) else (v, _HELP[k]) for k, v in values.items()}
    return {name: Option(value, text, type(value)) for name, (value, text) in pairs.items()}


# Methods that use the whole batch perturb all groups of it alike.
WHOLE = functools.partial(Method, build=build.sam, groups=False)
