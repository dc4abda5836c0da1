"""The combinator for loops that cannot pass ``grad_fn``: one gradient per call, two per step."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import chex
import jax
import jax.numpy as jnp
import optax
from jax import lax

from sam_optax._combinators.checks import check_copied, check_grads
from sam_optax._combinators.skip_nonfinite import all_finite
from sam_optax._internal import control_flow, extra_args, states, trees
from sam_optax._internal.hyperparameters import check_transformation
from sam_optax._internal.types import ExtraArgs, PyTree
from sam_optax._perturbations.perturbation import as_perturbation, perturbed_params
from sam_optax._schedules.when import GradNormWhen, When, check_when, decide_before, init_when

# Which gradient the next call takes; the last two do not always occur.
_ASCENT, _SHARP, _PLAIN, _UNUSED = range(4)


class AlternatingState(NamedTuple):
    """State of :func:`sam_optax.alternating`.

    Attributes:
      step: int32 scalar, the number of training steps taken (not of calls).
      skipped: int32 scalar, the number of steps skipped by ``skip_nonfinite``, not in ``step``.
      phase: int32 scalar, which gradient the next call takes. 0: the ascent gradient; 1: the sharp
        gradient, at the perturbed params; 2: the gradient of a step that does not perturb; 3: a
        gradient that is ignored, because the params have yet to move to the first random start.
      params: an exact copy of the unperturbed params w, with ``None`` in place of non-float leaves.
      ascent_grads: with ``keep_ascent_grads``, the last ascent gradient, with the structure and
        dtypes of w, else ``optax.EmptyState``.
      perturbation_state: state of the perturbation.
      other_perturbation_state: with ``skip_nonfinite``, in phase 1 the perturbation's state before
        this step, else ``optax.EmptyState``.
      base_state: state of the base optimizer.
      when_state: raw uint32 key of :func:`sam_optax.bernoulli`, else ``optax.EmptyState``.
    """

    step: chex.Array
    skipped: chex.Array
    phase: chex.Array
    params: optax.Params
    ascent_grads: optax.Updates
    perturbation_state: optax.OptState
    other_perturbation_state: PyTree
    base_state: optax.OptState
    when_state: PyTree


Moved: TypeAlias = tuple[optax.Updates, AlternatingState]
"""What the params move by in a call, and the new state."""


def alternating(
    base_tx: optax.GradientTransformation,
    perturbation: optax.GradientTransformation,
    *,
    when: When | None = None,
    skip_nonfinite: bool = False,
    keep_ascent_grads: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""SAM for training loops that cannot pass ``grad_fn``: two ordinary calls per training step.

    It is :func:`sharpness_aware` with the plain optax signature. Each call of ``update(grads,
    state, params)`` takes the gradient at the params that the previous call produced, and two calls
    are one training step:

    .. math::
        w \;\to\; w + \varepsilon \;\to\; w + \mathrm{base\_tx}(\nabla L(w + \varepsilon)).

    Between the two calls the params are perturbed: use :func:`eval_params` to evaluate, to save and
    at the end of training. With a random start, the second call moves the params to the next start.
    The very first call moves them to the first start and ignores its gradient, which is at w.

    A perturbation that takes its only gradient at its start (:func:`momentum_start`,
    :func:`low_pass`) takes one call per step, and one more at the beginning.

    Two calls with gradients on one batch are one step of ``sharpness_aware``, bit for bit where the
    moves are exact. The loop *adds* an update to the params, and floating-point addition cannot
    reach every number from every other: where a move halves or doubles an element or changes its
    sign, the element may end up (machine epsilon) × (length of the move) away from its target. Such
    errors do not accumulate: w is kept in the state, and each update is computed from the current
    params.

    In the training loop:

    * Use every batch for two consecutive calls (the first batch for three with a random start, the
      batch of a step that does not perturb for one). A different batch for the sharp gradient would
      be a different algorithm. BatchNorm statistics, if the loop keeps them, see both passes.
    * Nothing may change the updates after this transformation, because they move the params between
      two points. Weight decay and clipping belong inside ``base_tx``, where they act on w and on
      the sharp gradient. So do ``schedule_free``, ``mechanize`` and ``lookahead``, which rewrite
      the updates of the transformation they wrap; outside, their changes would go unnoticed.
    * ``optax.MultiSteps(alternating(...), k)`` averages both gradients over ``k`` microbatches.
    * ``when`` and the schedules in ``base_tx`` and ``perturbation`` count training steps. Wrappers
      outside, such as ``optax.inject_hyperparams``, count calls.

    Args:
      base_tx: the base optimizer, any optax transformation.
      perturbation: maps the ascent gradient to ε, as in :func:`sharpness_aware`.
      when: as in :func:`sharpness_aware`. A step that does not perturb takes one call.
      skip_nonfinite: whether to drop a step whose perturbed params or sharp gradient are not
        finite: the params return to w, and all state except ``state.skipped`` is restored to its
        value before the step. Costs a second copy of the perturbation's state.
      keep_ascent_grads: whether ``base_tx`` receives ``ascent_grads``, as it does from
        ``sharpness_aware``. Costs one copy of the gradient.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` with an :class:`AlternatingState`, which holds a
      copy of the params and the states of its parts. Updates have the dtypes of the params;
      non-float leaves do not change. Further keyword arguments of a call go to the perturbation or
      to ``base_tx``, whichever asks for them.

    Raises:
      TypeError: an argument is not a gradient transformation, or has the wrong type.
      ValueError: the perturbation averages over several samples; in ``update``, ``params`` or
        ``grads`` is missing; in ``init``, a wrapper has removed a random start.

    Example:
      >>> import jax, jax.numpy as jnp, optax, sam_optax
      >>> tx = sam_optax.alternating(optax.sgd(0.125), sam_optax.sam(rho=1.0))
      >>> params = jnp.array(3.0)
      >>> state = tx.init(params)
      >>> for _ in range(2):
      ...     updates, state = tx.update(jax.grad(lambda x: x**2)(params), state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     print(params, sam_optax.eval_params(params, state))
      4.0 3.0
      2.0 2.0
    """
    check_transformation("base_tx", base_tx)
    base = extra_args.only_asked(base_tx, extra_args.FOR_BASE)
    method = as_perturbation(perturbation)
    if method.samples > 1:
        raise ValueError(
            "alternating takes one gradient per call, but the perturbation averages over "
            f"{method.samples} samples: use samples=1."
        )
    check_when(when)
    if isinstance(when, GradNormWhen):
        raise ValueError(
            "when sees the gradient's norm (above_average), and alternating decides before there "
            "is a gradient: use sharpness_aware, or every, after or bernoulli."
        )

    def first_point(
        w: optax.Params, perturbation_state: optax.OptState, when_state: PyTree, step: chex.Array
    ) -> tuple[optax.Params, chex.Array]:
        """Where a training step takes its first gradient, and the phase of that gradient."""

        def start() -> optax.Params:
            return method.start_fn(w, perturbation_state, training_step=step)

        perturbed = decide_before(when, step, when_state)
        point = control_flow.cond(perturbed, start, lambda: w) if method.has_start else w
        return point, jnp.where(perturbed, _ASCENT, _PLAIN).astype(jnp.int32)

    def init_fn(params: optax.Params) -> AlternatingState:
        check_copied(params)
        step = jnp.zeros((), jnp.int32)
        first = _UNUSED if method.has_start else _ASCENT
        w = jax.tree.map(jnp.copy, trees.inexact_only(params))
        none = optax.EmptyState()
        when_state = init_when(when)
        return AlternatingState(
            step=step,
            skipped=jnp.zeros((), jnp.int32),
            phase=jnp.where(decide_before(when, step, when_state), first, _PLAIN).astype(jnp.int32),
            params=w,
            ascent_grads=jax.tree.map(jnp.zeros_like, w) if keep_ascent_grads else none,
            perturbation_state=method.init(params),
            other_perturbation_state=method.init(params) if skip_nonfinite else none,
            base_state=base.init(params),
            when_state=when_state,
        )

    def update_fn(
        updates: optax.Updates,
        state: AlternatingState,
        params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, AlternatingState]:
        if updates is None or params is None:
            raise ValueError(
                "alternating needs a gradient and the params that it was taken at: call "
                f"update(grads, state, params). Got grads={'...' if updates is not None else None}"
                f", params={'...' if params is not None else None}."
            )
        states.require("state", state, AlternatingState)
        check_grads(updates, params)
        step = state.step + state.skipped
        w = trees.merge(state.params, params)

        def perturb(grads: optax.Updates) -> tuple[optax.Params, optax.OptState]:
            extra_of_step = {"training_step": step, **extra}
            return perturbed_params(method, w, grads, state.perturbation_state, None, extra_of_step)

        def to(point: optax.Params, new_state: AlternatingState) -> Moved:
            return trees.displacement(updates, params, point), new_state

        def unless_nonfinite(
            tree: PyTree, proceed: Callable[[], Moved], back: AlternatingState
        ) -> Moved:
            def skip() -> Moved:
                point, phase = first_point(w, back.perturbation_state, state.when_state, step + 1)
                skipped = optax.safe_increment(state.skipped)
                return to(point, back._replace(skipped=skipped, phase=phase))

            if not skip_nonfinite:
                return proceed()
            return control_flow.cond(all_finite(tree), proceed, skip)

        def ascend() -> Moved:
            point, perturbation_state = perturb(updates)
            changes = {"phase": jnp.asarray(_SHARP, jnp.int32)}
            if keep_ascent_grads:
                changes["ascent_grads"] = trees.cast_tree_like(updates, state.ascent_grads)
            if skip_nonfinite:
                changes["other_perturbation_state"] = state.perturbation_state
            new_state = state._replace(perturbation_state=perturbation_state, **changes)
            return unless_nonfinite(point, lambda: to(point, new_state), state)

        def descend(
            ascent_grads: optax.Updates, perturbation_state: optax.OptState, perturbed: bool
        ) -> Moved:
            added: ExtraArgs = {"perturbed": perturbed}
            if keep_ascent_grads:
                added["ascent_grads"] = ascent_grads
            base_updates, base_state = base.update(
                updates, state.base_state, w, **extra_args.for_base(added, extra)
            )
            new_w = trees.add(w, base_updates)
            point, phase = first_point(new_w, perturbation_state, state.when_state, step + 1)
            new_state = state._replace(
                step=optax.safe_increment(state.step),
                phase=phase,
                params=trees.inexact_only(new_w),
                perturbation_state=perturbation_state,
                # Gradients wider than the params would widen the state, but branches must agree in
                # dtype.
                base_state=jax.tree.map(trees.cast_state_like, base_state, state.base_state),
            )
            return to(point, new_state)

        def single_pass() -> Moved:
            """Ascent and descent with the gradient at the start."""
            _, perturbation_state = perturb(updates)
            return unless_nonfinite(
                (updates, perturbation_state),
                lambda: descend(updates, perturbation_state, True),
                state,
            )

        def sharp() -> Moved:
            # The two states of the perturbation are swapped, so that they never share a buffer.
            undone = state._replace(
                perturbation_state=state.other_perturbation_state,
                other_perturbation_state=state.perturbation_state,
            )
            ascent_grads = trees.merge(state.ascent_grads, updates) if keep_ascent_grads else None
            return unless_nonfinite(
                updates, lambda: descend(ascent_grads, state.perturbation_state, True), undone
            )

        def plain() -> Moved:
            return unless_nonfinite(
                updates, lambda: descend(updates, state.perturbation_state, False), state
            )

        def move_to_start() -> Moved:
            point, phase = first_point(w, state.perturbation_state, state.when_state, step)
            return to(point, state._replace(phase=phase))

        branches = [single_pass if method.single_pass else ascend, sharp, plain, move_to_start]
        if not method.has_start:
            branches = branches[:2] if when is None else branches[:3]
        if control_flow.is_traced(state.phase):
            moves, new_state = lax.switch(state.phase, branches)
        else:
            moves, new_state = branches[int(state.phase)]()
        # Non-float leaves stay out of the branches, which cannot return every kind of leaf.
        return trees.merge(moves, jax.tree.map(trees.zeros_like, updates)), new_state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
