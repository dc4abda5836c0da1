"""The main combinator: any base optimizer, driven by the gradient at the perturbed params."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from chex import Array, Numeric
from jax.typing import DTypeLike
from optax import OptState, Params, Updates

from sam_optax._combinators import checks, step_info
from sam_optax._combinators.first_pass import FirstPassState
from sam_optax._combinators.gradient_functions import GradFn, Pass, ValueAndGradFn, evaluations
from sam_optax._combinators.options import Options
from sam_optax._combinators.skip_nonfinite import all_finite, unless_nonfinite
from sam_optax._combinators.step_gradients import Gradients, StepGradients, on_devices
from sam_optax._internal import control_flow, devices, roles, vectors
from sam_optax._internal.devices import AxisName
from sam_optax._internal.hyperparameters import check_float_dtype, saturating_sum, static_default
from sam_optax._internal.types import ExtraArgs, PyTree
from sam_optax._schedules.when import When, decide, init_when


class SharpnessAwareState(NamedTuple):
    """State of :func:`sam_optax.sharpness_aware`.

    Attributes:
      step: int32 scalar, the number of steps taken.
      skipped: int32 scalar, the number of steps skipped by ``skip_nonfinite``, not in ``step``.
        Schedules of the perturbation and ``when`` count both.
      perturbation_state: state of the perturbation.
      base_state: state of the base optimizer; with a descent the pair ``(descent's, base's)``.
      when_state: raw uint32 key of :func:`sam_optax.bernoulli`, statistics of
        :func:`sam_optax.above_average`, else ``optax.EmptyState``.
      info: :class:`~sam_optax.StepInfo` of the last step with ``info=True``, else ``None``.
    """

    step: Array
    skipped: Array
    perturbation_state: OptState
    base_state: OptState
    when_state: PyTree
    info: step_info.StepInfo | None


def sharpness_aware(
    base_tx: optax.GradientTransformation,
    perturbation: optax.GradientTransformation,
    *,
    descent: optax.GradientTransformation | None = None,
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
        w \leftarrow w + \mathrm{base\_tx}(\mathrm{descent}(\nabla L(w + \varepsilon))).

    ``update(grads, state, params, grad_fn=grad_fn)`` takes

    * ``grad_fn(params) -> grads``: the gradient on this step's batch (same batch, same dropout
      key), differentiated at the params it is given. In its place, ``value_fn`` or ``obj_fn``: the
      loss itself, ``params -> loss``; or ``value_and_grad_fn``: see :func:`pop_first_pass`;
    * ``grads``: the gradient at ``params`` if you have it, else ``None``. It is used as the ascent
      gradient, except by perturbations with a start (:func:`rsam`), which evaluate their own;
    * ``ascent_grad_fn(params) -> grads``, optional: the ascent gradient of perturbing steps, in
      place of ``grad_fn`` and ``grads``; for example on part of the batch (cheaper, see
      :func:`part_of_batch`), on another batch or on all data. Loss and aux of
      ``value_and_grad_fn`` are then those at the perturbed params;
    * any further keyword arguments, which are passed to all three parts.

    ``base_tx`` receives the sharp gradient and the unperturbed params, on which its weight decay,
    momentum and clipping act (clipping *before* ``sharpness_aware`` does not bound the update), and
    the loss of ``value_and_grad_fn`` as ``value``, if the caller passes none. The perturbation and
    the descent receive what the step knows, which wins over a caller's argument of the same name:

    * both: ``training_step``, ``norm_axis_name`` and ``ascent_grads``, the ascent gradient (for the
      descent the first one);
    * the perturbation: ``draw_index``, which tells the draws of one step apart, and ``base_state``,
      the state of ``base_tx`` before the step;
    * the descent: ``perturbed``, whether the step perturbs, and ``perturbation_state``, the
      perturbation's state before the step.

    Args:
      base_tx: the base optimizer, any optax transformation, line searches included.
      perturbation: maps the ascent gradient to ε, which is added to the params: :func:`sam`,
        :func:`asam`, :func:`fsam`, :func:`rsam` or any optax transformation.
      descent: an optax transformation of the sharp gradient in front of ``base_tx``, such as
        :func:`surrogate_gap`. Default: none.
      ascent_steps: number of ascent steps n ≥ 1, each from the point that the last one reached,
        with the full radius. Each costs one gradient. ``optax.contrib.sam``: ``sync_period=n + 1``.
      when: function of the training step (int32 scalar, from 0) that returns whether it perturbs:
        see :func:`every`, :func:`after`, :func:`bernoulli` and :func:`above_average`. On other
        steps ``base_tx`` and the descent run, with one gradient. Default: every step perturbs.
      skip_nonfinite: whether to skip a step whose ascent gradient (or its norm) or sharp gradient
        is not finite: the params and all state except ``state.skipped`` then do not change.
      perturb_dtype: dtype of the perturbed params. Default: each leaf's own. ``jnp.float32``
        prevents ε from being rounded away for low-precision params; ``grad_fn`` then gets float32
        params, and ``base_tx`` the gradient in the dtype of the params.
      axis_name: axis (or axes) of data-parallel devices, under ``jax.pmap`` or ``jax.shard_map``;
        not under ``jit`` with sharded arrays. ``grad_fn`` and ``grads`` are then each device's own
        gradient, a mean over its examples and not over the devices; the sharp gradient is averaged
        over the axis, and the state stays the same on all devices. ``()`` says that each device
        trains its own params, or that ``grad_fn`` averages over the devices itself.
      sync_perturbation: with ``axis_name``, whether all devices use the same ε, computed from the
        averaged ascent gradient (one further all-reduce). Default False: each device uses its own ε
        (m-sharpness, as the SAM paper suggests; in the ASAM paper on ImageNet and for PyramidNet).
      norm_axis_name: axis (or axes) that the params themselves are sharded over inside
        ``jax.shard_map``; not under ``jit``. Norms then span it, so that ‖ε‖ = ρ over the whole
        tree. With ``check_vma=True`` leaves that are replicated over the axis count once; without
        it all leaves are treated as sharded. Not supported for random starts and filter-wise
        normalization, whose kernels may be split between devices.
      groups: number n of groups of the batch, for m-sharpness on one device. Calls
        ``grad_fn(params, i)``, the gradient on group i (int32 scalar), one group after the other,
        gives each its own ε and averages the sharp gradients, the loss and aux of
        ``value_and_grad_fn(params, i)`` and the non-integer leaves of the state. Perturbing steps
        do not use ``grads``.
      info: whether the state keeps a :class:`StepInfo` with diagnostics of the last step.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` with a :class:`SharpnessAwareState`.

    Raises:
      TypeError: an argument has the wrong type or is in another's place; in ``init`` and
        ``update``, a leaf of the params is not an array, the state is another method's, or a
        function does not return a gradient.
      ValueError: ``ascent_steps`` < 1, or options that exclude each other; in ``init``, a wrapper
        has removed a start; in ``update``, ``params`` or the gradient function is missing, or it
        fails on the part of the params that ``optax.partition`` passes; an axis is not bound.

    Warns:
      UserWarning: the step is traced under an axis of ``jax.pmap`` or ``jax.shard_map`` along which
        the gradients may differ, and no axis is given: the params of the devices would drift apart.

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
    method, optimizer = checks.roles_of(base_tx, perturbation, descent)
    options = Options(
        method=method,
        ascent_steps=ascent_steps,
        when=when,
        skip_nonfinite=skip_nonfinite,
        perturb_dtype=check_float_dtype("perturb_dtype", perturb_dtype),
        axis_name=axis_name,
        sync_perturbation=sync_perturbation,
        norm_axis_name=norm_axis_name or None,
        groups=groups,
        info=info,
    )
    step = _Step(options, optimizer)
    return optax.GradientTransformationExtraArgs(step.init, step.update)


@dataclasses.dataclass(frozen=True)
class _Step:
    """One training step."""

    options: Options
    optimizer: roles.Descend

    def init(self, params: Params) -> SharpnessAwareState:
        """The state before the first step."""
        checks.check_params(params)
        return SharpnessAwareState(
            step=jnp.zeros((), jnp.int32),
            skipped=jnp.zeros((), jnp.int32),
            perturbation_state=self.options.method.init(params),
            base_state=self.optimizer.init(params),
            when_state=init_when(self.options.when),
            info=step_info.initial(params) if self.options.info else None,
        )

    def update(
        self,
        updates: Updates | None,
        state: SharpnessAwareState,
        params: Params | None = None,
        *,
        grad_fn: GradFn | None = None,
        value_and_grad_fn: ValueAndGradFn | None = None,
        ascent_grad_fn: GradFn | None = None,
        **extra: Any,
    ) -> tuple[Updates, SharpnessAwareState | FirstPassState]:
        """Finds g = ∇L(w), ε = perturbation(g), g_s = ∇L(w + ε), and base_tx(descent(g_s))."""
        options = self.options
        options.check_update(updates, params, value_and_grad_fn, ascent_grad_fn)
        checks.check_state(state, SharpnessAwareState)
        given = updates if value_and_grad_fn is None else None
        once = options.evaluates_once(given is not None)
        loss = evaluations(params, grad_fn, value_and_grad_fn, ascent_grad_fn, extra, once)
        loss = on_devices(options, loss)

        # All steps share g if the ascent starts at w and uses grad_fn on the whole batch.
        shared = not (loss.ascent_given or options.method.has_start or options.groups)
        g = Pass(None, given) if given is not None else loss.sharp(params) if shared else None
        step = saturating_sum(state.step, state.skipped)
        perturbed, when_state = decide(
            options.when, step, state.when_state, lambda: self._square(g)
        )
        base_state = self.optimizer.base_state(state.base_state)
        known = roles.for_perturbation(extra, training_step=step, base_state=base_state)
        gradients = StepGradients(options, loss, state.perturbation_state, params, known)
        first = g if shared else None
        # ε and both gradients, or ∇L(w) in place of both: see the methods.
        found = control_flow.cond(
            perturbed, lambda: gradients.averaged(first), lambda: gradients.plain(g, shared)
        ).mean(options)

        decided = state._replace(when_state=when_state)
        descend = functools.partial(self._descend, found, perturbed, step, decided, params, extra)
        if options.skip_nonfinite:
            info = (state.info or step_info.initial(params)) if options.info else None
            skipped = state._replace(skipped=optax.safe_increment(state.skipped), info=info)
            moves, new_state = unless_nonfinite(self._is_finite(found), descend, skipped)
        else:
            moves, new_state = descend()
        return moves, new_state if found.value is None else FirstPassState(new_state, found.value)

    def _descend(
        self,
        found: Gradients,
        perturbed: Numeric,
        step: jax.Array,
        state: SharpnessAwareState,
        params: Params,
        extra: ExtraArgs,
    ) -> tuple[Updates, SharpnessAwareState]:
        """The updates from both gradients, and the new state."""
        axis = self.options.norm_axis_name
        added = {
            "ascent_grads": found.ascent,
            "norm_axis_name": axis,
            "perturbation_state": state.perturbation_state,
            "perturbed": perturbed,
            "training_step": step,
        }
        if found.value is not None:
            # Loss and aux stay local to each device, but the state must be equal on all of them.
            extra = {"value": self.options.mean(found.value[0]), **extra}
        moves, base_state = self.optimizer.update(
            found.sharp, state.base_state, params, added, extra
        )
        info = None
        if found.climb is not None:
            info = step_info.collect(found.ascent, found.sharp, found.climb, axis)
        return moves, state._replace(
            step=optax.safe_increment(state.step),
            perturbation_state=found.perturbation_state,
            base_state=base_state,
            info=info,
        )

    def _square(self, g: Pass | None) -> jax.Array:
        """‖g‖², for a ``when`` that depends on it."""
        assert g is not None
        return self.options.mean(jnp.square(vectors.norm(g.grads, self.options.norm_axis_name)))

    def _is_finite(self, found: Gradients) -> jax.Array:
        """Whether the step can be taken.

        The ascent gradient is checked too: the sharp gradient may be finite although g is not. (The
        norm of g costs nothing if the perturbation has already computed it.)
        """
        axis = self.options.norm_axis_name
        g_is_finite = devices.all_true(jnp.isfinite(vectors.norm(found.ascent, axis)), axis)
        finite = g_is_finite & all_finite(found.sharp, axis)
        if self.options.ascent_steps > 1:
            finite &= all_finite(found.perturbation_state, axis)
        return finite
