"""Marks the state of a perturbation with a start, to detect a start that a wrapper has lost.

A wrapper such as ``optax.chain`` keeps only ``init`` and ``update``. Its state then contains the
mark, although it has no ``start_fn``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import optax

from sam_optax._internal import states

StartFn: TypeAlias = Callable[..., optax.Params]
"""``(params, state, **extra) -> params``: where the ascent gradient is taken."""


class _Marked(NamedTuple):
    state: optax.OptState


class StartState(_Marked):
    """State of every perturbation with a start, that is, whose first gradient is not at the params.

    It marks the state, also when nested in the state of a larger transformation, to detect a
    wrapper that kept ``init`` and ``update`` but lost ``start_fn``.

    Attributes:
      state: the state of the method, such as :class:`~sam_optax.RandomStartState`. Its fields can
        be read and replaced through this object too.
    """

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a protocol that this class does not implement
            raise AttributeError(name)
        return getattr(self.state, name)

    def _replace(self, /, **fields: Any) -> "StartState":
        return StartState(fields["state"] if "state" in fields else self.state._replace(**fields))


def guarded(
    init: optax.TransformInitFn,
    update: optax.TransformUpdateExtraArgsFn,
    has_start: bool,
    state_type: states.StateType | None,
) -> tuple[optax.TransformInitFn, optax.TransformUpdateExtraArgsFn]:
    """``init`` and ``update`` that mark the state if there is a start and check its type."""

    def init_fn(params: optax.Params) -> optax.OptState:
        return StartState(init(params)) if has_start else _refuse_lost_start(init(params))

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        own = _unmarked(state, state_type) if has_start else state
        if state_type is not None:
            states.require("perturbation_state", own, state_type)
        elif not has_start:
            _refuse_lost_start(own)
        eps, own = update(updates, own, params, **extra)
        return eps, StartState(own) if has_start else own

    return init_fn, update_fn


def of_marked(start_fn: StartFn, state_type: states.StateType | None) -> StartFn:
    """``start_fn`` for the marked state."""
    return lambda params, state, **extra: start_fn(params, _unmarked(state, state_type), **extra)


def _unmarked(state: StartState, state_type: states.StateType | None) -> optax.OptState:
    states.require("perturbation_state", state, StartState, state_type)
    return state.state


def _refuse_lost_start(state: optax.OptState) -> optax.OptState:
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, StartState))
    if any(isinstance(node, StartState) for node in nodes):
        raise ValueError(
            "the perturbation contains a start (a random start: random_start, rsam or low_pass; "
            "momentum_start; or a Perturbation with a start_fn) inside a wrapper such as "
            "optax.chain or optax.inject_hyperparams, which would take the ascent gradient at the "
            "params and not at the start. Put the start outermost, "
            "random_start(optax.chain(...), key=key), and inject_hyperparams around "
            "sharpness_aware."
        )
    return state
