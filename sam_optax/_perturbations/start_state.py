"""The mark on the state of a perturbation with a start, by which a start that is lost is noticed.

A wrapper such as ``optax.chain`` takes over ``init`` and ``update`` alone. Its state then holds the
mark, and whoever uses it as a perturbation finds the mark and no ``start_fn``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from sam_optax._internal import states


class _Marked(NamedTuple):
    state: optax.OptState


class StartState(_Marked):
    """State of every perturbation that has a start, and takes its first gradient there.

    It marks the state wherever that lies in the state of a larger transformation, so that a
    wrapper that took over ``init`` and ``update`` but lost ``start_fn`` is noticed.

    Attributes:
      state: the method's own state, such as :class:`~sam_optax.RandomStartState`, whose fields
        can be read and replaced here too.
    """

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols that the marker does not have
            raise AttributeError(name)
        return getattr(self.state, name)

    def _replace(self, /, **fields: Any) -> "StartState":
        return StartState(fields["state"] if "state" in fields else self.state._replace(**fields))


def guarded(
    init: Callable[..., Any],
    update: Callable[..., Any],
    has_start: bool,
    state_type: states.StateType | None,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """``init`` and ``update`` that mark the state of a start and refuse another method's."""

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


def of_marked(
    start_fn: Callable[..., Any], state_type: states.StateType | None
) -> Callable[..., Any]:
    """``start_fn``, which is handed the marked state and sees the method's own."""
    return lambda params, state, **extra: start_fn(params, _unmarked(state, state_type), **extra)


def _unmarked(state: StartState, state_type: states.StateType | None) -> Any:
    states.require("perturbation_state", state, StartState, state_type)
    return state.state


def _refuse_lost_start(state: optax.OptState) -> optax.OptState:
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, StartState))
    if any(isinstance(node, StartState) for node in nodes):
        raise ValueError(
            "the perturbation contains a start of its own (a random start: random_start, rsam or "
            "low_pass; momentum_start; or a Perturbation with a start_fn) inside a wrapper such "
            "as optax.chain or optax.inject_hyperparams, which would take the ascent gradient at "
            "the params and not at the start. Put the start outermost, "
            "random_start(optax.chain(...), key=key), and inject_hyperparams around "
            "sharpness_aware."
        )
    return state
