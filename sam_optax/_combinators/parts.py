"""The gradients of a whole step: averaged over devices, groups of the batch and samples."""

import warnings

import jax
import jax.numpy as jnp
from chex import Numeric
from optax import OptState, Params, Updates

from sam_optax._combinators import step_info
from sam_optax._combinators.gradient_functions import Evaluation, Evaluations, Pass
from sam_optax._combinators.options import Options
from sam_optax._combinators.perturbed_gradient import Gradients, perturbed_gradient
from sam_optax._internal import control_flow, devices, trees
from sam_optax._internal.types import ExtraArgs


def on_devices(options: Options, loss: Evaluations) -> Evaluations:
    """Gradients of each device; ascent gradients are averaged if all devices share one ε."""

    def own(evaluate: Evaluation) -> Evaluation:
        return lambda w, *group: evaluate(devices.local(w, options.axis_name), *group)

    ascent = own(loss.ascent)
    return loss._replace(
        sharp=own(loss.sharp), ascent=lambda *args: _synchronized(options, ascent(*args))
    )


def _synchronized(options: Options, found: Pass) -> Pass:
    return found._replace(grads=options.synchronized(found.grads))


def averaged_gradients(
    options: Options,
    loss: Evaluations,
    first: Pass | None,
    state: OptState,
    params: Params,
    extra: ExtraArgs,
) -> Gradients:
    """The gradients of a step that perturbs: the mean over its parts, evaluated one by one.

    ``first`` is the ascent gradient, if it is known; ``extra`` is for the perturbation.
    """
    own_axis, samples = options.own_axis, options.method.samples
    parts = (options.groups or 1) * samples
    first = None if first is None else _synchronized(options, first)
    state, params = devices.local(state, own_axis), devices.local(params, own_axis)
    extra = {**extra, "norm_axis_name": options.norm_axis_name, "state_axis_name": own_axis}

    def part(*index: Numeric) -> Gradients:
        # The index of a draw differs between parts and between devices that perturb differently.
        given = {**extra, "draw_index": devices.draw_index(own_axis, parts, index)}
        on_part = loss.of_group(index[0] // samples) if options.groups else loss
        return perturbed_gradient(options, on_part, first, state, params, given)

    alone = parts == 1 and not options.groups
    found = part() if alone else control_flow.mean_of(part, parts, params)
    # Averaging the non-integer leaves keeps the state equal on all devices. The moving average of
    # F-SAM is linear in the gradient, so it then sees the mean gradient.
    return found._replace(
        perturbation_state=devices.pmean(found.perturbation_state, own_axis),
        climb=options.mean(found.climb),
    )


def plain_gradients(
    options: Options,
    loss: Evaluations,
    g: Pass | None,
    shared: bool,
    state: OptState,
    params: Params,
) -> Gradients:
    """The gradients of a step that does not perturb: both are the one at the params, on the batch.

    ``g`` is that gradient, if it is known; ``shared``: whether it is also the ascent gradient of a
    step that perturbs, whose dtypes the ascent gradient then has.
    """
    if g is None and options.groups:
        g = control_flow.mean_of(lambda i: loss.sharp(params, i), options.groups, params)
    elif g is None:
        g = loss.sharp(params)
    grads = _in_dtypes_of_sharp(options, g.grads, loss.sharp, params)
    ascent = options.synchronized(g.grads if shared else grads)
    climb = step_info.no_climb(params) if options.info else None
    return Gradients(g.value, ascent, grads, state, climb)


def _in_dtypes_of_sharp(
    options: Options, grads: Updates, sharp: Evaluation, params: Params
) -> Updates:
    """The gradient at the params in the dtypes of a sharp one: branches of ``lax.cond`` must agree.

    The caller's gradient may be wider or narrower than the result of ``grad_fn``.
    """
    # Outside of jit the branches need not agree, and checking would trace at every step.
    known = options.perturb_dtype is not None or not control_flow.is_traced(params, grads)
    if known and trees.same_dtypes(grads, params):
        return grads
    like = params
    if options.perturb_dtype is None:
        group = [jnp.zeros((), jnp.int32)] if options.groups else []
        like = jax.eval_shape(sharp, params, *group).grads
    return trees.map_inexact(trees.as_dtype_of, grads, like)


def mean_over_devices(options: Options, found: Gradients) -> Gradients:
    """Both gradients averaged over the devices."""
    if options.axis_name is None and options.norm_axis_name is None:
        warn_of_drift("sharpness_aware", found.sharp)
    return found._replace(ascent=options.mean(found.ascent), sharp=options.mean(found.sharp))


def warn_of_drift(who: str, grads: Updates) -> None:
    """Warns if devices take different gradients, as far as JAX shows it.

    Under ``jax.pmap`` and without ``check_vma`` a ``grad_fn`` that averages over the devices itself
    looks the same.
    """
    axes = [axis for axis in devices.manual_axes() if not devices.all_replicated(grads, axis)]
    if axes:
        names = axes[0] if len(axes) == 1 else tuple(axes)
        warnings.warn(
            f"{who} is traced under the axis {names!r} of jax.pmap or jax.shard_map without "
            "axis_name: if grad_fn returns each device's own gradient, the params of the "
            "devices drift apart, even if grads are averaged. Pass "
            f"axis_name={names!r}, with grad_fn and grads of each device, not averaged; or "
            f"norm_axis_name={names!r} if the params are sharded over the axis; or axis_name=() if "
            "grad_fn averages over the devices itself, or each device trains its own params.",
            UserWarning,
            stacklevel=2,
        )
