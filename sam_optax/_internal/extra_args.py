"""Finds out which extra arguments a transformation asks for.

optax passes extra arguments of ``update`` to every part of a chain, but some parts reject unknown
arguments: line searches, and transformations with closed signatures. So arguments that this library
adds are passed only to a transformation some part of which mentions them.
"""

import inspect
from collections.abc import Collection
from typing import Any

import optax

from sam_optax._internal.reachable_functions import functions_of, reads_kwargs, words_of
from sam_optax._internal.types import ExtraArgs, Function

FOR_PERTURBATIONS = (
    "ascent_grads",
    "draw_index",
    "norm_axis_name",
    "state_axis_name",
    "training_step",
)
"""Extra arguments that the combinators add for a perturbation."""

FOR_BASE = ("ascent_grads", "norm_axis_name", "perturbation_state", "perturbed")
"""Extra arguments that the combinators add for a base optimizer."""


def only_asked(
    transformation: optax.GradientTransformation, names: Collection[str]
) -> optax.GradientTransformationExtraArgs:
    """The transformation, without those of the named arguments that it does not ask for."""
    inner = optax.with_extra_args_support(transformation)
    unasked = set(names) - asked_for(transformation, names)
    if not unasked:
        return inner

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        given = {name: value for name, value in extra.items() if name not in unasked}
        return inner.update(updates, state, params, **given)

    return optax.GradientTransformationExtraArgs(inner.init, update_fn)


def asked_for(
    transformation: optax.GradientTransformation, names: Collection[str]
) -> frozenset[str]:
    """The names that the update function, or a function that it calls, mentions.

    Functions are found through closures, partial applications and bound methods, where
    ``optax.chain`` and other wrappers keep their parts. A function that reads its ``**kwargs`` as a
    whole, or an update function that cannot be inspected, counts as asking for everything.
    """
    found: set[str] = set()
    for function in functions_of(transformation.update):
        if function is None or reads_kwargs(function):
            return frozenset(names)
        found |= words_of(function.__code__)
    return frozenset(names) & found


def for_base(added: ExtraArgs, given: ExtraArgs) -> ExtraArgs:
    """The extra arguments of a base optimizer: the combinator's and the caller's.

    A line search rejects extra arguments that are not arguments of its loss, even if another part
    of its chain asks for them. So the loss is wrapped to accept and ignore them.
    """
    arguments = {**added, **given}
    if callable(given.get("value_fn")):
        arguments["value_fn"] = _tolerant(given["value_fn"])
    return arguments


def _tolerant(loss_fn: Function) -> Function:
    """A loss whose signature accepts the arguments that the combinators add, and ignores them."""
    signature = inspect.signature(loss_fn)
    added = [name for name in FOR_BASE if name not in signature.parameters]
    parameters = [
        *signature.parameters.values(),
        *(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in added),
    ]
    parameters.sort(key=lambda parameter: parameter.kind)  # **kwargs must be last

    def tolerant(*args: Any, **kwargs: Any) -> Any:
        return loss_fn(*args, **{k: v for k, v in kwargs.items() if k not in added})

    tolerant.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return tolerant
