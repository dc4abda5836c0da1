"""The combinator: any optimizer, driven by the gradient at the perturbed params."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from sam_optax._combinators import gradient_functions, step_info
from sam_optax._combinators.gradient_functions import FirstPassState, GradFn, ValueAndGradFn
from sam_optax._combinators.step import Gradients, Passes
from sam_optax._combinators.step_info import StepInfo
from sam_optax._internal import control_flow, devices, states, trees
from sam_optax._internal.devices import AxisName
from sam_optax._internal.hyperparameters import (
    check_float_dtype,
    check_integer,
    check_transformation,
    static_default,
)
from sam_optax._perturbations.perturbation import as_perturbation
from sam_optax._schedules import when as when_rule
from sam_optax._schedules.when import When


class SharpnessAwareState(NamedTuple):
    """State of :func:`sam_optax.sharpness_aware`.

    Attributes:
      step: int32 scalar, the number of steps taken.
      skipped: int32 scalar, the number of steps skipped by ``skip_nonfinite``, not in ``step``.
        Schedules of the perturbation and ``when`` count both.
      perturbation_state: state of the perturbation.
      base_state: state of the base optimizer.
      when_state: raw uint32 key of :func:`sam_optax.bernoulli`, else ``optax.EmptyState``.
      info: :class:`~sam_optax.StepInfo` of the last step with ``info=True``, else ``None``.
    """

    step: chex.Array
    skipped: chex.Array
    perturbation_state: optax.OptState
    base_state: optax.OptState
    when_state: Any
    info: StepInfo | None


def sharpness_aware(
    base_tx: optax.GradientTransformation,
    perturbation: optax.GradientTransformation,
    *,
    ascent_steps: int = static_default(1),
    when: When | None = None,
    skip_nonfinite: bool = False,
    perturb_dtype: Any | None = None,
    axis_name: AxisName | None = None,
    sync_perturbation: bool = False,
    norm_axis_name: AxisName | None = None,
    groups: int | None = None,
    info: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Drives ``base_tx`` with the gradient at the perturbed params.

    .. math::
        \varepsilon = \mathrm{perturbation}(\nabla L(w)), \qquad
        w \leftarrow w + \mathrm{base\_tx}(\nabla L(w + \varepsilon)).

    ``update(grads, state, params, grad_fn=grad_fn)`` takes

    * ``grad_fn(params) -> grads``: the gradient on this step's batch (same batch, same dropout
      key), differentiated at the params it is given;
    * ``grads``: the gradient at ``params`` if there is one already, else ``None``. It is the
      ascent gradient of every perturbation without a random start, so one further gradient is
      evaluated. A random start evaluates its own and does not use ``grads``;
    * ``ascent_grad_fn(params) -> grads``, optional: what leads the ascent in place of ``grad_fn``
      and ``grads``, evaluated by perturbing steps alone: the gradient on part of the batch
      (:func:`part_of_batch`, cheaper), on another batch or on all data. Loss and aux of
      ``value_and_grad_fn`` are then those at the perturbed params;
    * any further keyword arguments, which go to the perturbation and to ``base_tx``.

    ``base_tx`` also receives the first ascent gradient, as ``ascent_grads``, and whether the step
    perturbs, as ``perturbed``: see :func:`surrogate_gap`, :func:`mix_gradients` and
    :func:`reuse_orthogonal`. Weight decay, momentum and clipping in ``base_tx`` act on the sharp
    gradient and on the unperturbed params; a clip in front of ``sharpness_aware`` changes the
    ascent gradient only, and does not bound the update.

    Args:
      base_tx: the base optimizer, any optax transformation.
      perturbation: maps the ascent gradient to ε, which is added to the params: :func:`sam`,
        :func:`asam`, :func:`fsam`, :func:`rsam` or any optax transformation.
      ascent_steps: number of ascent steps n ≥ 1, each from the point the last one reached, with
        the full radius; each costs a gradient. ``sync_period=n + 1`` of ``optax.contrib.sam``.
      when: function of the training step (int32 scalar, from 0) that says whether it perturbs.
        Other steps are ``base_tx``'s, bit for bit, and evaluate one gradient. See :func:`every`,
        :func:`after` and :func:`bernoulli`. Default: every step perturbs.
      skip_nonfinite: whether a step whose sharp gradient (or ascent gradient) is not finite leaves
        the params and all state as they were but for the count ``state.skipped``.
      perturb_dtype: dtype of the perturbed params. Default: each leaf's own. ``jnp.float32``
        keeps ε from being rounded away for low-precision params; ``grad_fn`` then gets float32
        params, and ``base_tx`` the gradient in the dtype of the params.
      axis_name: the axis (or axes) of data-parallel devices, under ``jax.pmap`` or
        ``jax.shard_map``. ``grad_fn`` and ``grads`` are then each device's own gradient, a mean
        over its examples; the sharp gradient is averaged over the axis, and the state stays the
        same on all devices. Under ``jit`` with sharded arrays, leave it out.
      sync_perturbation: with ``axis_name``, whether all devices perturb by the same ε, that of the
        averaged ascent gradient (one further all-reduce). Default False: each by its own
        (m-sharpness, what the papers train with).
      norm_axis_name: the axis (or axes) that the params themselves are sharded over inside
        ``jax.shard_map``: norms then span it, so that ‖ε‖ = ρ over the whole tree. With
        ``check_vma=True`` leaves that are replicated over the axis count once; without it all
        leaves are taken as sharded. Not for random starts and filters, whose kernels may be cut.
        Under ``jit`` with sharded arrays, leave it out.
      groups: m-sharpness on one device: the number n of groups of the batch. Calls
        ``grad_fn(params, i)``, the gradient on group i (int32 scalar), gives each group its own ε
        and averages the sharp gradients, one group after the other; ``grads`` is not used by
        perturbing steps. Loss and aux of ``value_and_grad_fn(params, i)`` are means over the
        groups. State that is not integer is averaged over groups and devices.
      info: whether the state keeps the last step in numbers: norms of both gradients and of ε,
        the gradients' cosine and the rise of the loss, as a :class:`StepInfo`.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` with a :class:`SharpnessAwareState`.

    Raises:
      TypeError: an argument is not a gradient transformation, or of the wrong kind; in ``init``
        and ``update``, a leaf of the params is no array, or the state is another method's.
      ValueError: ``ascent_steps`` < 1, or more than one for a perturbation that takes its only
        gradient at its start; in ``update``, ``params`` or ``grad_fn`` is missing; in ``init``, a
        wrapper has cut a start off.

    Example:
      >>> import jax, jax.numpy as jnp, optax, sam_optax
      >>> tx = sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.sam(rho=1.0))
      >>> x = jnp.array(3.0)
      >>> state = tx.init(x)
      >>> grad_fn = jax.grad(lambda x: x**2)
      >>> updates, state = tx.update(grad_fn(x), state, x, grad_fn=grad_fn)
      >>> print(updates)  # the sharp gradient is 2 (3 + 1) = 8
      -0.8

    References:
      Foret et al., `Sharpness-Aware Minimization for Efficiently Improving Generalization
      <https://arxiv.org/abs/2010.01412>`_, 2021.
    """
    check_transformation("base_tx", base_tx)
    base = optax.with_extra_args_support(base_tx)
    method = as_perturbation(perturbation)
    check_integer("ascent_steps", ascent_steps, lower=1)
    if method.single_pass and ascent_steps > 1:
        raise ValueError(
            f"ascent_steps must be 1 for a perturbation that takes its only gradient at its start "
            f"(momentum_start, low_pass), got {ascent_steps!r}."
        )
    when_rule.check(when)
    perturb_dtype = check_float_dtype("perturb_dtype", perturb_dtype)
    if groups is not None:
        check_integer("groups", groups, lower=1)
    if norm_axis_name is not None and method.has_start:
        raise ValueError(
            f"norm_axis_name={norm_axis_name!r} does not go with a random start, whose noise is "
            "scaled by the norms of whole kernels. Shard the params under jit instead."
        )
    if sync_perturbation and axis_name is None:
        raise ValueError("sync_perturbation=True needs axis_name, the axis to synchronize over.")

    passes = Passes(
        method,
        int(ascent_steps),
        perturb_dtype,
        axis_name,
        sync_perturbation,
        norm_axis_name,
        groups,
        info,
    )

    def init_fn(params: optax.Params) -> SharpnessAwareState:
        trees.require_arrays(params)
        return SharpnessAwareState(
            step=jnp.zeros((), jnp.int32),
            skipped=jnp.zeros((), jnp.int32),
            perturbation_state=method.init(params),
            base_state=base.init(params),
            when_state=when_rule.init(when),
            info=step_info.initial(params) if info else None,
        )

    def update_fn(
        updates: optax.Updates | None,
        state: SharpnessAwareState,
        params: optax.Params | None = None,
        *,
        grad_fn: GradFn | None = None,
        value_and_grad_fn: ValueAndGradFn | None = None,
        ascent_grad_fn: GradFn | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, SharpnessAwareState | FirstPassState]:
        if params is None:
            raise ValueError(
                "sharpness_aware needs the params: call update(grads, state, params, "
                "grad_fn=grad_fn)."
            )
        evaluate = gradient_functions.evaluation(grad_fn, value_and_grad_fn)
        _check_state(state, params)
        devices.check_local(updates, axis_name)
        if value_and_grad_fn is not None:
            gradient_functions.check_value_and_grad(updates, method.has_start)
            updates = None  # a random start does not use them
        ascent = gradient_functions.ascent_evaluation(ascent_grad_fn, method.single_pass)
        in_both = when is not None and (method.has_start or ascent is not None)
        if passes.evaluations(updates is not None) > 1 or groups or in_both:
            evaluate = gradient_functions.trace_once(evaluate, params)
            ascent = None if ascent is None else gradient_functions.trace_once(ascent, params)
        training_step = state.step + state.skipped
        first = None
        if updates is not None or ascent is None:
            first = passes.first_pass(evaluate, updates, params)

        def sharp() -> Gradients:
            return passes.sharp(
                evaluate,
                ascent,
                first,
                state.perturbation_state,
                params,
                {"training_step": training_step, **extra},
            )

        def plain() -> Gradients:
            result = passes.plain(evaluate, first, state.perturbation_state, params)
            if updates is None or trees.same_dtypes(updates, params):
                return result
            # The gradient that the caller gave may be wider than the ones that grad_fn returns.
            like = jax.eval_shape(sharp)
            value, ascent_grads = result.first
            return result._replace(
                grads=trees.map_inexact(trees.as_dtype_of, result.grads, like.grads),
                first=(
                    value,
                    trees.map_inexact(trees.as_dtype_of, ascent_grads, like.first[1]),
                ),
            )

        perturbed = when_rule.decide(when, training_step, state.when_state)
        result = control_flow.cond(perturbed, sharp, plain)
        grads = devices.pmean(result.grads, axis_name)
        value, ascent_grads = result.first
        ascent_grads = devices.pmean(ascent_grads, axis_name)
        base_extra = {"ascent_grads": ascent_grads, "perturbed": perturbed}
        if norm_axis_name is not None:
            base_extra["norm_axis_name"] = norm_axis_name
        base_extra.update(extra)
        if value is not None:
            # Loss and aux are returned as each device's own; the state has to be the same on all.
            base_extra.setdefault("value", devices.pmean(value[0], axis_name))

        seen = None
        if result.climbed is not None:
            seen = step_info.collect(ascent_grads, grads, result.climbed, norm_axis_name)

        def descend() -> tuple[optax.Updates, SharpnessAwareState]:
            new_updates, base_state = base.update(grads, state.base_state, params, **base_extra)
            return new_updates, state._replace(
                step=optax.safe_increment(state.step),
                perturbation_state=result.perturbation_state,
                base_state=base_state,
                info=seen,
            )

        def skip() -> tuple[optax.Updates, SharpnessAwareState]:
            unchanged = jax.tree.map(trees.no_update, jax.eval_shape(descend)[0])
            return unchanged, state._replace(skipped=optax.safe_increment(state.skipped))

        if skip_nonfinite:
            # Also what led to the sharp gradient: it may be finite where the ascent was not.
            finite = control_flow.all_finite((grads, ascent_grads, result.perturbation_state))
            new_updates, new_state = control_flow.cond(finite, descend, skip)
        else:
            new_updates, new_state = descend()
        return new_updates, new_state if value is None else FirstPassState(new_state, value)

    known: dict[Any, str] = {}

    def _check_state(state: Any, params: optax.Params) -> None:
        """Raises for the state of another method, or of no method."""
        if isinstance(state, FirstPassState):
            raise ValueError(
                "the state still holds the last step's first pass: take it out with "
                "state, (loss, aux) = sam_optax.pop_first_pass(state)."
            )
        if not isinstance(state, SharpnessAwareState):
            states.check("state", state, SharpnessAwareState.__name__)
        structure = jax.tree.structure(params)
        if structure not in known:
            trees.require_arrays(params)
            known[structure] = states.describe(jax.eval_shape(method.init, params))
        states.check("state.perturbation_state", state.perturbation_state, known[structure])

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
