"""Groups of the batch and samples of a random start: perturbations whose gradients are averaged."""

from collections.abc import Callable
from typing import Any

import chex
import optax

from sam_optax._combinators.gradient_functions import Evaluation, Evaluations, Pass
from sam_optax._combinators.perturbed_gradient import Gradients
from sam_optax._internal import control_flow, devices
from sam_optax._internal.types import ExtraArgs

Perturbed = Callable[..., Gradients]
"""``(loss, first, state, params, extra) -> Gradients``."""


def over_parts(
    perturbed: Perturbed, groups: int | None, samples: int, axis_name: devices.AxisName | None
) -> Perturbed:
    """The average of ``perturbed`` over all samples of all groups, evaluated sequentially.

    The extra argument ``draw_index`` distinguishes the parts, and also the devices of ``axis_name``
    if they perturb differently.
    """
    parts = (groups or 1) * samples

    def one_part(*args: Any, index: tuple[chex.Numeric, ...] = ()) -> Gradients:
        loss, first, state, params, extra = args
        if groups:
            group = index[0] // samples
            loss = Evaluations(of_group(loss.sharp, group), of_group(loss.ascent, group), loss[2])
        draw = devices.draw_index(axis_name, parts, index)
        drawn = extra if draw is None else {"draw_index": draw, **extra}
        return perturbed(loss, first, state, params, drawn)

    def averaged(
        loss: Evaluations,
        first: Pass | None,
        state: optax.OptState,
        params: optax.Params,
        extra: ExtraArgs,
    ) -> Gradients:
        if parts == 1 and not groups:
            return one_part(loss, first, state, params, extra)
        return control_flow.mean_of(
            lambda i: one_part(loss, None, state, params, extra, index=(i,)), parts, params
        )

    return averaged


def of_group(evaluate: Evaluation, group: chex.Numeric) -> Evaluation:
    """The gradient on one group of the batch."""
    return lambda params: evaluate(params, group)


def plain_pass(evaluate: Evaluation, groups: int | None, params: optax.Params) -> Pass:
    """The gradient at the params, on the whole batch."""
    if groups:
        return control_flow.mean_of(lambda i: evaluate(params, i), groups, params)
    return evaluate(params)
