"""Every gradient transformation that optax exports, built, so that tests cover new ones, too."""

import functools
import inspect
import warnings
from typing import Any

import jax
import optax
import optax.contrib

# What is passed for a required argument (and for a key) of this name.
ARGUMENTS: dict[str, Any] = {
    "adv_optimizer": optax.sgd(0.1),
    "clipping": 0.1,
    "decay": 0.9,
    "eta": 0.1,
    "f": lambda *args: args[0],
    "freeze_mask": False,
    "gamma": 0.5,
    "key": jax.random.key(0),
    "l2_norm_clip": 1.0,
    "learning_rate": 0.1,
    "mask": True,
    "max_backtracking_steps": 10,
    "max_consecutive_errors": 3,
    "max_delta": 0.1,
    "max_linesearch_steps": 10,
    "max_norm": 0.1,
    "measure": lambda updates, *args, **kwargs: updates,
    "measure_name": "size",
    "noise_multiplier": 0.0,
    "param_labels": lambda params: jax.tree.map(lambda _: "all", params),
    "seed": 0,
    "should_transform_fn": lambda step, *args, **kwargs: step >= 0,
    "should_update_fn": lambda step, *args, **kwargs: step >= 0,
    "slow_step_size": 0.5,
    "step_size": 0.1,
    "step_size_fn": lambda step: 0.1,
    "sync_period": 2,
    "threshold": 0.1,
}
# Arguments that hold the optimizer that is wrapped.
INNER = ("base_optimizer", "fast_optimizer", "inner", "optimizer", "tx")
# Wrappers that take their optimizer in a form of its own.
SPECIAL = {
    "chain": lambda f, inner: f(optax.identity(), inner),
    "named_chain": lambda f, inner: f(("first", optax.identity()), ("second", inner)),
    "inject_hyperparams": lambda f, inner: f(lambda rate: optax.chain(inner, optax.scale(rate)))(
        rate=1.0
    ),
    "inject_stateful_hyperparams": lambda f, inner: f(
        lambda rate: optax.chain(inner, optax.scale(rate))
    )(rate=1.0),
    "multi_transform": lambda f, inner: f({"all": inner}, ARGUMENTS["param_labels"]),
    "partition": lambda f, inner: f({"all": inner}, ARGUMENTS["param_labels"]),
    "with_extra_args_support": lambda f, inner: f(inner),
}


def _of_matrices(scale_by_muon: Any) -> optax.GradientTransformation:
    dimensions = optax.contrib.MuonDimensionNumbers()
    return optax.masked(
        scale_by_muon(weight_dimension_numbers=lambda p: jax.tree.map(lambda _: dimensions, p)),
        lambda params: jax.tree.map(lambda x: x.ndim == 2, params),
    )


@functools.cache
def exported() -> dict[str, Any]:
    """The functions of ``optax`` and ``optax.contrib`` that return a transformation, by name."""
    return {
        name: function
        for module in (optax, optax.contrib)
        for name, function in sorted(vars(module).items())
        if not name.startswith("_")
        and inspect.isfunction(function)
        and "GradientTransformation" in str(inspect.signature(function).return_annotation)
    }


def wraps(name: str) -> bool:
    """Whether a function takes an optimizer."""
    return name in SPECIAL or any(a in INNER for a in _required(exported()[name]))


def is_optimizer(name: str) -> bool:
    """Whether the function makes a complete optimizer, and not a piece or a wrapper."""
    parameters = inspect.signature(exported()[name]).parameters
    return "learning_rate" in parameters and not wraps(name) and not name.startswith("scale_by")


def build(name: str, inner: Any = None) -> optax.GradientTransformation:
    """What the function returns, around ``inner`` if it is a wrapper."""
    function = exported()[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of functions, and of seeds
        if name in SPECIAL:
            return SPECIAL[name](function, inner)
        if name == "scale_by_muon":
            return _of_matrices(function)
        given = {p: inner if p in INNER else ARGUMENTS[p] for p in _required(function)}
        if "key" in inspect.signature(function).parameters:
            given["key"] = ARGUMENTS["key"]
        return function(**given)


def _required(function: Any) -> list[str]:
    return [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]


OPTIMIZERS = [name for name in exported() if not wraps(name)]
WRAPPERS = [name for name in exported() if wraps(name)]
