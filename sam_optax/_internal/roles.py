"""Who receives which arguments of a step. Nothing else in the library decides it.

A base optimizer receives the caller's arguments, a perturbation also :data:`FOR_PERTURBATIONS`
(``None`` where the caller of its ``update``, ``perturb_fn`` or ``start_fn`` does not know one), and
a descent also :data:`FOR_DESCENTS`. What a step adds wins over the caller's argument of that name.
"""

import contextvars
import dataclasses
from typing import Any

import optax
from optax import OptState, Params, Updates

from sam_optax._internal.types import ExtraArgs

FOR_PERTURBATIONS = (
    "ascent_grads",  # the gradient before any piece of a chain has changed it
    "base_state",  # the base optimizer's state before the step
    "draw_index",  # distinguishes the draws of one step
    "norm_axis_name",  # the axis that norms span
    "state_axis_name",  # the axis along which states are averaged
    "training_step",
)
FOR_DESCENTS = (
    "ascent_grads",  # the first one of the step
    "norm_axis_name",  # the axis that norms span
    "perturbation_state",  # the perturbation's state before the step
    "perturbed",  # whether the step perturbs
    "training_step",
)


def of_perturbation(updates: Updates, extra: ExtraArgs) -> ExtraArgs:
    """The arguments of a perturbation's ``update``, each of which is present."""
    return {**dict.fromkeys(FOR_PERTURBATIONS), "ascent_grads": updates, **extra}


def for_perturbation(extra: ExtraArgs, **known: Any) -> ExtraArgs:
    """The caller's arguments and what a step knows; ``update`` itself adds the ascent gradient."""
    given = {**extra, **dict.fromkeys(FOR_PERTURBATIONS), **known}
    del given["ascent_grads"]
    return given


def open_to_arguments(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """The transformation, tolerating extra arguments if optax's protocol says that it does not.

    One that claims the protocol and breaks it fails with its own ``TypeError``, and a note.
    """
    inner = optax.with_extra_args_support(tx)

    def update_fn(
        updates: Updates, state: OptState, params: Params | None = None, **extra: Any
    ) -> tuple[Updates, OptState]:
        try:
            return inner.update(updates, state, params, **extra)
        except TypeError as error:
            if "unexpected keyword argument" in str(error):
                error.add_note(
                    "By optax's protocol, the update of a GradientTransformationExtraArgs accepts "
                    "any keyword argument: write update(updates, state, params=None, **extra). "
                    "(optax's line searches refuse those that are not arguments of their value_fn.)"
                )
            raise

    return optax.GradientTransformationExtraArgs(inner.init, update_fn)


_place: contextvars.ContextVar[str | None] = contextvars.ContextVar("place", default=None)


def _init(place: str, tx: optax.GradientTransformation, params: Params) -> OptState:
    token = _place.set(place)
    try:
        return tx.init(params)
    finally:
        _place.reset(token)


def refuse_other_places() -> None:
    """Raises for a perturbation that is initialized as a part of ``base_tx`` or ``descent``."""
    if place := _place.get():
        raise TypeError(
            f"{place} contains a Perturbation, as sam_optax.sam() returns: pass it as perturbation."
        )


@dataclasses.dataclass(frozen=True)
class Descend:
    """A descent, if any, and a base optimizer; the state is the base's, or the pair of both."""

    descent: optax.GradientTransformationExtraArgs | None
    base: optax.GradientTransformationExtraArgs

    def init(self, params: Params) -> OptState:
        """The state before the first step."""
        base_state = _init("base_tx", self.base, params)
        if self.descent is None:
            return base_state
        return _init("descent", self.descent, params), base_state

    def base_state(self, state: OptState) -> OptState:
        """The base optimizer's part of the state."""
        return state if self.descent is None else state[1]

    def update(
        self, grads: Updates, state: OptState, params: Params, added: ExtraArgs, extra: ExtraArgs
    ) -> tuple[Updates, OptState]:
        """The updates from the sharp gradient; ``added`` is for the descent alone."""
        if self.descent is None:
            return self.base.update(grads, state, params, **extra)
        descent_state, base_state = state
        given = {**extra, **dict.fromkeys(FOR_DESCENTS), **added}
        grads, descent_state = self.descent.update(grads, descent_state, params, **given)
        updates, base_state = self.base.update(grads, base_state, params, **extra)
        return updates, (descent_state, base_state)
