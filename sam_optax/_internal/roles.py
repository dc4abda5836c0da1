"""Who receives which arguments of a step. Nothing else in the library decides it.

* A perturbation receives the caller's arguments and :data:`FOR_PERTURBATIONS`; what the caller of
  its ``update``, ``perturb_fn`` or ``start_fn`` does not know is ``None``.
* A descent receives the caller's arguments and :data:`FOR_DESCENTS`.
* A base optimizer receives the caller's arguments.

What a step adds wins over an argument of the caller that has the same name.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import optax
from optax import OptState, Params, Updates

from sam_optax._internal.types import ExtraArgs

FOR_PERTURBATIONS = (
    "ascent_grads",
    "base_state",
    "draw_index",
    "norm_axis_name",
    "state_axis_name",
    "training_step",
)
"""The gradient before any piece of a chain has changed it; the base optimizer's state before the
step; an index that distinguishes draws of one step; the axis that norms span; the axis along which
states are averaged; the training step."""

FOR_DESCENTS = (
    "ascent_grads",
    "norm_axis_name",
    "perturbation_state",
    "perturbed",
    "training_step",
)
"""The first ascent gradient; the axis that norms span; the perturbation's state before the step;
whether the step perturbs; the training step."""


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

    A transformation that claims optax's protocol and breaks it, an ExtraArgs ``update`` without
    ``**extra``, fails with its own ``TypeError``, to which a note is added.
    """
    inner = optax.with_extra_args_support(tx)

    def update_fn(
        updates: Updates, state: OptState, params: Params | None = None, **extra: Any
    ) -> tuple[Updates, OptState]:
        with _explaining_closed_signatures():
            return inner.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update_fn)


@contextlib.contextmanager
def _explaining_closed_signatures() -> Iterator[None]:
    try:
        yield
    except TypeError as error:
        if "unexpected keyword argument" in str(error):
            error.add_note(
                "By optax's protocol, the update of a GradientTransformationExtraArgs accepts any "
                "keyword argument: write update(updates, state, params=None, **extra). (optax's "
                "line searches refuse those that are not arguments of their value_fn.)"
            )
        raise


@dataclasses.dataclass(frozen=True)
class Descend:
    """The descent, if there is one, and behind it the base optimizer.

    The state is that of the base optimizer, or the pair of both, as ``optax.chain`` has it.
    """

    descent: optax.GradientTransformationExtraArgs | None
    base: optax.GradientTransformationExtraArgs

    def init(self, params: Params) -> OptState:
        """The state before the first step."""
        base_state = self.base.init(params)
        return base_state if self.descent is None else (self.descent.init(params), base_state)

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
        missing = dict.fromkeys(FOR_DESCENTS)
        grads, descent_state = self.descent.update(
            grads, descent_state, params, **{**extra, **missing, **added}
        )
        updates, base_state = self.base.update(grads, base_state, params, **extra)
        return updates, (descent_state, base_state)
