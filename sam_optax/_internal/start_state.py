"""Marks the state of a perturbation with a start, to detect a start that a wrapper has lost."""

from typing import Any, NamedTuple

import jax
from optax import OptState

from sam_optax._internal import checks


class _Marked(NamedTuple):
    state: OptState


class StartState(_Marked):
    """State of every perturbation with a start, that is, whose first gradient is not at the params.

    It marks the state, also when nested in the state of a larger transformation, to detect a
    wrapper such as ``optax.chain`` that kept ``init`` and ``update`` but lost ``start_fn``.

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


def unmarked(state: OptState, state_type: checks.StateType | None) -> OptState:
    """The method's own state."""
    checks.require_state("perturbation_state", state, StartState, state_type)
    return state.state


def refuse_lost_start(state: OptState) -> OptState:
    """Raises if a state without a start contains the mark of one."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, StartState))
    if any(isinstance(node, StartState) for node in nodes):
        raise ValueError(
            "the perturbation contains a start (a random start: random_start, rsam or low_pass; "
            "momentum_start; or a Perturbation with a start_fn) inside a wrapper such as "
            "optax.chain or optax.inject_hyperparams, which would take the ascent gradient at the "
            "params and not at the start. Put the start outermost, random_start(optax.chain(...), "
            "key=key), and inject_hyperparams around sharpness_aware."
        )
    return state
