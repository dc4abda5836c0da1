"""The main combinator: any base optimizer, driven by the gradient at the perturbed params."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from sam_optax._combinators import step_info
from sam_optax._combinators.across_devices import Devices
from sam_optax._combinators.batch_parts import over_parts, plain_pass
from sam_optax._combinators.branch_dtypes import in_dtypes_of_sharp
from sam_optax._combinators.checks import (
    check_functions,
    check_grads,
    check_options,
    check_params,
    check_state,
)
from sam_optax._combinators.first_pass import FirstPassState
from sam_optax._combinators.gradient_functions import (
    GradFn,
    Pass,
    ValueAndGradFn,
    evaluations,
)
from sam_optax._combinators.perturbed_gradient import Gradients, PerturbedGradient
from sam_optax._combinators.skip_nonfinite import all_finite, norm_is_finite, unless_nonfinite
from sam_optax._combinators.step_info import StepInfo
from sam_optax._internal import control_flow, extra_args, vectors
from sam_optax._internal.devices import AxisName, check_local
from sam_optax._internal.hyperparameters import (
    check_float_dtype,
    check_transformation,
    static_default,
)
from sam_optax._internal.types import ExtraArgs, LossAndAux, PyTree
from sam_optax._perturbations.perturbation import as_perturbation
from sam_optax._schedules.when import When, decide, init_when


class SharpnessAwareState(NamedTuple):
    """State of :func:`sam_optax.sharpness_aware`.

    Attributes:
      step: int32 scalar, the number of steps taken.
      skipped: int32 scalar, the number of steps skipped by ``skip_nonfinite``, not in ``step``.
        Schedules of the perturbation and ``when`` count both.
      perturbation_state: state of the perturbation.
      base_state: state of the base optimizer.
      when_state: raw uint32 key of :func:`sam_optax.bernoulli`, statistics of
        :func:`sam_optax.above_average`, else ``optax.EmptyState``.
      info: :class:`~sam_optax.StepInfo` of the last step with ``info=True``, else ``None``.
    """

    step: chex.Array
    skipped: chex.Array
    perturbation_state: optax.OptState
    base_state: optax.OptState
    when_state: PyTree
    info: StepInfo | None


def sharpness_aware(
    base_tx: optax.GradientTransformation,
    perturbation: optax.GradientTransformation,
    *,
    ascent_steps: int = static_default(1),
    when: When | None = None,
    skip_nonfinite: bool = False,
    perturb_dtype: DTypeLike | None = None,
    axis_name: AxisName | None = None,
    sync_perturbation: bool = False,
    norm_axis_name: AxisName | None = None,
    groups: int | None = None,
    info: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Wraps an optimizer so that it descends along the gradient at nearby, perturbed params (SAM).

    .. math::
        \varepsilon = \mathrm{perturbation}(\nabla L(w)), \qquad
        w \leftarrow w + \mathrm{base\_tx}(\nabla L(w + \varepsilon)).

    ``update(grads, state, params, grad_fn=grad_fn)`` takes

    * ``grad_fn(params) -> grads``: the gradient on this step's batch (same batch, same dropout
      key), differentiated at the params it is given. In its place, ``value_fn`` or ``obj_fn``: the
      loss itself, ``params -> loss``; or ``value_and_grad_fn``: see :func:`pop_first_pass`;
    * ``grads``: the gradient at ``params`` if you have it, else ``None``. It is used as the ascent
      gradient, except by perturbations with a start (:func:`rsam`), which evaluate their own;
    * ``ascent_grad_fn(params) -> grads``, optional: the ascent gradient, in place of ``grad_fn``
      and ``grads``, in perturbing steps only. For example the gradient on part of the batch
      (cheaper, see :func:`part_of_batch`), on another batch or on all data. Loss and aux of
      ``value_and_grad_fn`` are then those at the perturbed params;
    * any further keyword arguments, which are passed to the perturbation and to ``base_tx``.

    ``base_tx`` receives the sharp gradient and the unperturbed params, on which its weight decay,
    momentum and clipping act. (Clipping before ``sharpness_aware`` changes the ascent gradient only
    and does not bound the update.) If it asks for them by name, it also receives the first ascent
    gradient as ``ascent_grads``, whether the step perturbs as ``perturbed`` (see
    :func:`surrogate_gap`), the perturbation's state before the step as ``perturbation_state``,
    ``norm_axis_name``, and the loss of ``value_and_grad_fn`` as ``value``.

    Args:
      base_tx: the base optimizer, any optax transformation, line searches included.
      perturbation: maps the ascent gradient to ε, which is added to the params: :func:`sam`,
        :func:`asam`, :func:`fsam`, :func:`rsam` or any optax transformation.
      ascent_steps: number of ascent steps n ≥ 1, each from the point that the last one reached,
        with the full radius. Each costs one gradient. Corresponds to ``sync_period=n + 1`` of
        ``optax.contrib.sam``.
      when: function of the training step (int32 scalar, from 0) that returns whether it perturbs:
        see :func:`every`, :func:`after`, :func:`bernoulli` and :func:`above_average`. On other
        steps only ``base_tx`` runs, bit for bit, with one gradient. Default: every step perturbs.
      skip_nonfinite: whether to skip a step whose ascent gradient (or its norm) or sharp gradient
        is not finite: the params and all state except ``state.skipped`` then do not change.
      perturb_dtype: dtype of the perturbed params. Default: each leaf's own. ``jnp.float32``
        prevents ε from being rounded away for low-precision params; ``grad_fn`` then gets float32
        params, and ``base_tx`` the gradient in the dtype of the params.
      axis_name: axis (or axes) of data-parallel devices, under ``jax.pmap`` or ``jax.shard_map``;
        not under ``jit`` with sharded arrays. ``grad_fn`` and ``grads`` are then each device's own
        gradient, a mean over its examples; the sharp gradient is averaged over the axis, and the
        state stays the same on all devices.
      sync_perturbation: with ``axis_name``, whether all devices use the same ε, computed from the
        averaged ascent gradient (one further all-reduce). Default False: each device uses its own ε
        (m-sharpness, which the SAM paper suggests; the ASAM paper trains with it on ImageNet and
        with PyramidNet only).
      norm_axis_name: axis (or axes) that the params themselves are sharded over inside
        ``jax.shard_map``; not under ``jit``. Norms then span it, so that ‖ε‖ = ρ over the whole
        tree. With ``check_vma=True`` leaves that are replicated over the axis count once; without
        it all leaves are treated as sharded. Not supported for random starts and filter-wise
        normalization, whose kernels may be split between devices.
      groups: number n of groups of the batch, for m-sharpness on one device. Calls
        ``grad_fn(params, i)``, the gradient on group i (int32 scalar), one group after the other,
        gives each its own ε and averages the sharp gradients; perturbing steps do not use
        ``grads``. Loss and aux of ``value_and_grad_fn(params, i)`` and the non-integer leaves of
        the state are averaged over the groups.
      info: whether the state keeps a :class:`StepInfo` with diagnostics of the last step: norms of
        both gradients and of ε, the cosine between the gradients, the share of the start in ε, and
        the rise of the loss.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` with a :class:`SharpnessAwareState`.

    Raises:
      TypeError: an argument has the wrong type, such as an ``optax.MultiSteps`` without
        ``.gradient_transformation()``; in ``init`` and ``update``, a leaf of the params is not an
        array, the state is another method's, or a function does not return a gradient.
      ValueError: ``ascent_steps`` < 1, or options that exclude each other; in ``init``, a wrapper
        has removed a start; in ``update``, ``params`` or the gradient function is missing, or it
        fails on the part of the params that ``optax.partition`` or ``masked`` passes.

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
    method = as_perturbation(perturbation)
    check_options(
        method,
        ascent_steps=ascent_steps,
        when=when,
        axis_name=axis_name,
        sync_perturbation=sync_perturbation,
        norm_axis_name=norm_axis_name,
        groups=groups,
    )
    perturb_dtype = check_float_dtype("perturb_dtype", perturb_dtype)

    base = extra_args.only_asked(base_tx, extra_args.FOR_BASE)
    base_takes_value = "value" in extra_args.asked_for(base_tx, ("value",))
    devices = Devices(
        axis_name=axis_name, sync_perturbation=sync_perturbation, norm_axis_name=norm_axis_name
    )
    one_perturbation = PerturbedGradient(
        method=method, ascent_steps=int(ascent_steps), perturb_dtype=perturb_dtype, info=info
    )
    perturbed_gradient = devices.perturbed(
        over_parts(one_perturbation, groups, method.samples, devices.own_axis)
    )

    def init_fn(params: optax.Params) -> SharpnessAwareState:
        check_params(params)
        return SharpnessAwareState(
            step=jnp.zeros((), jnp.int32),
            skipped=jnp.zeros((), jnp.int32),
            perturbation_state=method.init(params),
            base_state=base.init(params),
            when_state=init_when(when),
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
        """One step: g = ∇L(w), ε = perturbation(g), g_s = ∇L(w + ε), w ← w + base_tx(g_s)."""
        if params is None:
            raise ValueError(
                "sharpness_aware needs the params: call update(grads, state, params, "
                "grad_fn=grad_fn)."
            )
        check_params(params)
        check_state(state, SharpnessAwareState)
        check_functions(method, when, updates, value_and_grad_fn, ascent_grad_fn)
        check_local(updates, axis_name)
        given = updates is not None and value_and_grad_fn is None
        once = groups is None and when is None and one_perturbation.evaluates_once(given)
        loss = devices.evaluations(
            evaluations(params, grad_fn, value_and_grad_fn, ascent_grad_fn, extra, once)
        )
        step = state.step + state.skipped

        # Both branches share g if the ascent starts at w and uses grad_fn on the whole batch.
        leads = not (loss.ascent_given or method.has_start or groups)
        if given:
            check_grads(updates, params)
            first: Pass | None = Pass(None, updates)
        else:
            first = loss.sharp(params) if leads else None

        def squared_norm() -> jax.Array:
            assert first is not None
            return devices.mean(jnp.square(vectors.norm(first.grads, norm_axis_name)))

        perturbed, when_state = decide(when, step, state.when_state, squared_norm)

        def perturb() -> Gradients:
            extra_of_step = {"training_step": step, **extra}
            g = first if leads else None
            return perturbed_gradient(loss, g, state.perturbation_state, params, extra_of_step)

        def do_not_perturb() -> Gradients:
            g = plain_pass(loss.sharp, groups, params) if first is None else first
            grads = in_dtypes_of_sharp(g.grads, loss.sharp, params, perturb_dtype, groups)
            ascent = devices.synchronized(g.grads if leads else grads)
            climb = step_info.no_climb(params) if info else None
            return Gradients(g.value, ascent, grads, state.perturbation_state, climb)

        found = control_flow.cond(perturbed, perturb, do_not_perturb)
        g, g_s = devices.mean((found.ascent, found.sharp))

        def descend() -> tuple[optax.Updates, SharpnessAwareState]:
            new_updates, base_state = base.update(
                g_s, state.base_state, params, **base_extra(g, perturbed, state, found.value, extra)
            )
            return new_updates, state._replace(
                step=optax.safe_increment(state.step),
                perturbation_state=found.perturbation_state,
                base_state=base_state,
                when_state=when_state,
                info=None
                if found.climb is None
                else step_info.collect(g, g_s, found.climb, norm_axis_name),
            )

        if skip_nonfinite:
            # The ascent gradient is checked too: the sharp gradient may be finite although g is
            # not. (The norm of g costs nothing if the perturbation has already computed it.)
            finite = norm_is_finite(g, norm_axis_name) & all_finite(g_s, norm_axis_name)
            if ascent_steps > 1:
                finite &= all_finite(found.perturbation_state, norm_axis_name)
            skipped = state._replace(skipped=optax.safe_increment(state.skipped))
            new_updates, new_state = unless_nonfinite(finite, descend, skipped)
        else:
            new_updates, new_state = descend()
        return new_updates, new_state if found.value is None else FirstPassState(
            new_state, found.value
        )

    def base_extra(
        ascent_grads: optax.Updates,
        perturbed: chex.Numeric,
        state: SharpnessAwareState,
        value: LossAndAux | None,
        extra: ExtraArgs,
    ) -> ExtraArgs:
        """The extra arguments of the base optimizer: the caller's and those that it asks for."""
        given = {
            "ascent_grads": ascent_grads,
            "perturbed": perturbed,
            "perturbation_state": state.perturbation_state,
        }
        if norm_axis_name is not None:
            given["norm_axis_name"] = norm_axis_name
        if value is not None and base_takes_value:
            # Loss and aux stay local to each device, but the state must be equal on all of them.
            given["value"] = devices.mean(value[0])
        return extra_args.for_base(given, extra)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
