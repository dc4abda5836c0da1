"""What a step of ``sharpness_aware`` needs, in clear words where it is missing."""

from typing import Any

from sam_optax._combinators.first_pass import FirstPassState
from sam_optax._internal import states
from sam_optax._perturbations.perturbation import Perturbation


def check_state(state: Any, expected: type) -> None:
    """Raises for the state of another method, or of no method."""
    if isinstance(state, FirstPassState):
        raise ValueError(
            "the state still holds the last step's first pass: take it out with "
            "state, (loss, aux) = sam_optax.pop_first_pass(state)."
        )
    states.require("state", state, expected)


def check_functions(
    method: Perturbation, updates: Any, value_and_grad_fn: Any, ascent_grad_fn: Any
) -> None:
    """Raises for gradient functions that do not go with the perturbation or the gradient given."""
    if value_and_grad_fn is not None and updates is not None and not method.has_start:
        raise ValueError(
            "value_and_grad_fn is for grads=None: where the gradient at the params is given, its "
            "caller has the loss too. Pass grads and grad_fn."
        )
    if ascent_grad_fn is not None and method.single_pass:
        raise ValueError(
            "ascent_grad_fn does not go with a perturbation that takes its only gradient at its "
            "start (momentum_start, low_pass): leave it out."
        )
