"""The combinator for loops that cannot pass ``grad_fn``: one gradient per call, two per step."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from chex import Array
from jax import lax
from optax import OptState, Params, Updates

from sam_optax._combinators import checks
from sam_optax._combinators.skip_nonfinite import all_finite
from sam_optax._internal import control_flow, roles, trees
from sam_optax._internal.checks import require_gradient
from sam_optax._internal.hyperparameters import saturating_sum
from sam_optax._internal.types import ExtraArgs, PyTree
from sam_optax._perturbations.perturbation import Perturbation, perturbed_params
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
      ascent_grads: with a descent, the last ascent gradient, with the structure and dtypes of w,
        else ``optax.EmptyState``.
      perturbation_state: state of the perturbation.
      other_perturbation_state: with ``skip_nonfinite`` or a descent, in phase 1 the perturbation's
        state before this step, else ``optax.EmptyState``.
      base_state: state of the base optimizer; with a descent the pair ``(descent's, base's)``.
      when_state: raw uint32 key of :func:`sam_optax.bernoulli`, else ``optax.EmptyState``.
    """

    step: Array
    skipped: Array
    phase: Array
    params: Params
    ascent_grads: Updates
    perturbation_state: OptState
    other_perturbation_state: PyTree
    base_state: OptState
    when_state: PyTree


Moved: TypeAlias = tuple[Updates, AlternatingState]
"""What the params move by in a call, and the new state."""


def alternating(
    base_tx: optax.GradientTransformation,
    perturbation: optax.GradientTransformation,
    *,
    descent: optax.GradientTransformation | None = None,
    when: When | None = None,
    skip_nonfinite: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""SAM for training loops that cannot pass ``grad_fn``: two ordinary calls per training step.

    It is :func:`sharpness_aware` with the plain optax signature. Each call of ``update(grads,
    state, params)`` takes the gradient at the params that the previous call produced, and two calls
    are one training step:

    .. math::
        w \;\to\; w + \varepsilon \;\to\; w + \mathrm{base\_tx}(\nabla L(w + \varepsilon)).

    Between the two calls the params are perturbed: use :func:`eval_params` to evaluate, to save and
    at the end of training. With a random start, the second call moves the params to the next start,
    and the very first call moves them to the first start and ignores its gradient, which is at w. A
    perturbation that takes its only gradient at its start (:func:`momentum_start`,
    :func:`low_pass`) takes one call per step, and one more at the beginning.

    Two calls with gradients on one batch are one step of ``sharpness_aware``, bit for bit where
    the moves are exact. The loop *adds* an update to the params, and floating-point addition cannot
    reach every number: where a move halves or doubles an element or changes its sign, the element
    may end up (machine epsilon) × (length of the move) away from its target. Such errors do not
    accumulate: w is kept in the state, and each update is computed from the current params.

    In the training loop:

    * Use every batch for two consecutive calls (the first batch for three with a random start, the
      batch of a step that does not perturb for one): a different batch for the sharp gradient would
      be a different algorithm. BatchNorm statistics, if the loop keeps them, see both passes. Make
      data that depend on the params (adversarial examples, a GAN's other network) once per step, at
      ``eval_params(params, state)``. A loop that draws batches inside and takes an optimizer cannot
      be used; if it takes the loss, use :func:`sharp_loss`.
    * Nothing may change the updates after this transformation, because they move the params between
      two points. Weight decay, clipping, frozen leaves, ``schedule_free`` and ``mechanize`` belong
      inside ``base_tx``; ``optax.lookahead`` works neither inside nor around. :func:`eval_params`
      raises an error for what it can see in the state.
    * ``optax.MultiSteps(alternating(...), k)`` averages both gradients over ``k`` microbatches.
    * ``when`` and the schedules in ``base_tx`` and ``perturbation`` count training steps. Wrappers
      outside, such as ``optax.inject_hyperparams``, count calls.

    Args:
      base_tx: the base optimizer, any optax transformation.
      perturbation: maps the ascent gradient to ε.
      descent: as in :func:`sharpness_aware`. Costs one copy of the gradient, which is kept from the
        first call to the second, and one of the perturbation's state.
      when: as in :func:`sharpness_aware`. A step that does not perturb takes one call.
      skip_nonfinite: whether to drop a step whose perturbed params or sharp gradient are not
        finite: the params return to w, and all state except ``state.skipped`` is restored to its
        value before the step. Costs a second copy of the perturbation's state.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` with an :class:`AlternatingState`. Updates have
      the dtypes of the params; non-float leaves do not change.

    Raises:
      TypeError: an argument has the wrong type or is in another's place.
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
    method, optimizer = checks.roles_of(base_tx, perturbation, descent)
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
    step = _Step(method, optimizer, when, skip_nonfinite)
    return optax.GradientTransformationExtraArgs(step.init, step.update)


@dataclasses.dataclass(frozen=True)
class _Step:
    """A training step of one or two calls; the attributes are arguments of :func:`alternating`."""

    method: Perturbation
    optimizer: roles.Descend
    when: When | None
    skip_nonfinite: bool

    @property
    def keeps_ascent_grads(self) -> bool:
        """Whether a call needs the gradient of the call before."""
        return self.optimizer.descent is not None and not self.method.single_pass

    @property
    def keeps_perturbation_state(self) -> bool:
        """Whether a call needs the perturbation's state from before the call before."""
        return self.optimizer.descent is not None or self.skip_nonfinite

    def init(self, params: Params) -> AlternatingState:
        """The state before the first call."""
        checks.check_copied(params)
        step, skipped = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        w = jax.tree.map(jnp.copy, trees.inexact_only(params))
        when_state = init_when(self.when)
        perturbed = decide_before(self.when, step, when_state)
        first = _UNUSED if self.method.has_start else _ASCENT
        none = optax.EmptyState()
        return AlternatingState(
            step=step,
            skipped=skipped,
            phase=jnp.where(perturbed, first, _PLAIN).astype(jnp.int32),
            params=w,
            ascent_grads=jax.tree.map(jnp.zeros_like, w) if self.keeps_ascent_grads else none,
            perturbation_state=self.method.init(params),
            other_perturbation_state=(
                self.method.init(params) if self.keeps_perturbation_state else none
            ),
            base_state=self.optimizer.init(params),
            when_state=when_state,
        )

    def update(
        self, updates: Updates, state: AlternatingState, params: Params | None = None, **extra: Any
    ) -> Moved:
        """One call: the move that the phase prescribes, from ``params``."""
        if updates is None or params is None:
            raise ValueError(
                "alternating needs a gradient and the params that it was taken at: call "
                f"update(grads, state, params). Got grads={'...' if updates is not None else None}"
                f", params={'...' if params is not None else None}."
            )
        checks.check_state(state, AlternatingState)
        require_gradient("grads", updates, params)
        call = _Call(self, updates, params, state, extra)
        first = call.single_pass if self.method.single_pass else call.ascend
        branches = [first, call.sharp, call.plain, call.move_to_start]
        if not self.method.has_start:
            branches = branches[:2] if self.when is None else branches[:3]
        if control_flow.is_traced(state.phase):
            moves, new_state = lax.switch(state.phase, branches)
        else:
            moves, new_state = branches[int(state.phase)]()
        # Non-float leaves stay out of the branches, which cannot return every kind of leaf.
        return trees.merge(moves, jax.tree.map(trees.zeros_like, updates)), new_state


@dataclasses.dataclass(frozen=True)
class _Call:
    """One call of a step, with its gradient, its params and the state before it."""

    of: _Step
    grads: Updates
    params: Params
    state: AlternatingState
    extra: ExtraArgs

    @property
    def step(self) -> jax.Array:
        """The training step, skipped ones included."""
        return saturating_sum(self.state.step, self.state.skipped)

    @property
    def w(self) -> Params:
        """The unperturbed params."""
        return trees.merge(self.state.params, self.params)

    def ascend(self) -> Moved:
        """From w to w + ε."""
        point, now = self._perturb()
        state = self.state._replace(phase=jnp.asarray(_SHARP, jnp.int32), perturbation_state=now)
        if self.of.keeps_ascent_grads:
            kept = trees.cast_tree_like(self.grads, self.state.ascent_grads)
            state = state._replace(ascent_grads=kept)
        if self.of.keeps_perturbation_state:
            state = state._replace(other_perturbation_state=self.state.perturbation_state)
        return self._if_finite(point, lambda: (self._to(point), state), self.state)

    def sharp(self) -> Moved:
        """From w + ε to the next step."""
        g = self.grads  # of a single pass, which only traces this
        if self.of.keeps_ascent_grads:
            g = trees.merge(self.state.ascent_grads, self.grads)
        before, now = self.state.other_perturbation_state, self.state.perturbation_state
        # The two states of the perturbation are swapped, so that they never share a buffer.
        undone = self.state._replace(perturbation_state=before, other_perturbation_state=now)
        return self._if_finite(self.grads, lambda: self._descend(g, before, now, True), undone)

    def single_pass(self) -> Moved:
        """From the start, which is w + ε, to the next step."""
        g, before = self.grads, self.state.perturbation_state
        _, now = self._perturb()
        return self._if_finite((g, now), lambda: self._descend(g, before, now, True), self.state)

    def plain(self) -> Moved:
        """From w to the next step, without a perturbation."""
        g, before = self.grads, self.state.perturbation_state
        return self._if_finite(g, lambda: self._descend(g, before, before, False), self.state)

    def move_to_start(self) -> Moved:
        """From w to the first start."""
        return self._to_first_point(self.w, self.state, self.step)

    def _arguments(self, base_state: OptState, step: jax.Array) -> ExtraArgs:
        """The arguments of the perturbation."""
        own = self.of.optimizer.base_state(base_state)
        return roles.for_perturbation(self.extra, training_step=step, base_state=own)

    def _perturb(self) -> tuple[Params, OptState]:
        """``w + ε`` and the perturbation's new state."""
        arguments = self._arguments(self.state.base_state, self.step)
        before = self.state.perturbation_state
        return perturbed_params(self.of.method, self.w, self.grads, before, None, arguments)

    def _descend(
        self, ascent_grads: Updates, before: OptState, now: OptState, perturbed: bool
    ) -> Moved:
        """The step from w; ``before`` and ``now`` are the perturbation's states around it."""
        added = {"ascent_grads": ascent_grads, "perturbation_state": before}
        added |= {"perturbed": perturbed, "training_step": self.step}
        moves, base_state = self.of.optimizer.update(
            self.grads, self.state.base_state, self.w, added, self.extra
        )
        w = trees.add(self.w, moves)
        state = self.state._replace(
            step=optax.safe_increment(self.state.step),
            params=trees.inexact_only(w),
            perturbation_state=now,
            # Gradients wider than the params would widen it, but branches must agree in dtype.
            base_state=jax.tree.map(trees.cast_state_like, base_state, self.state.base_state),
        )
        return self._to_first_point(w, state, optax.safe_increment(self.step))

    def _to_first_point(self, w: Params, state: AlternatingState, step: jax.Array) -> Moved:
        """To where a training step takes its first gradient, with the phase of that gradient."""

        def start() -> Params:
            arguments = self._arguments(state.base_state, step)
            return self.of.method.start_fn(w, state.perturbation_state, **arguments)

        perturbed = decide_before(self.of.when, step, state.when_state)
        point = control_flow.cond(perturbed, start, lambda: w) if self.of.method.has_start else w
        phase = jnp.where(perturbed, _ASCENT, _PLAIN).astype(jnp.int32)
        return self._to(point), state._replace(phase=phase)

    def _to(self, point: Params) -> Updates:
        """The updates that move the params to a point."""
        return trees.displacement(self.grads, self.params, point)

    def _if_finite(
        self, tree: PyTree, proceed: Callable[[], Moved], back: AlternatingState
    ) -> Moved:
        """``proceed()``, or back to w in the state ``back`` if the tree is not finite."""

        def skip() -> Moved:
            skipped = back._replace(skipped=optax.safe_increment(back.skipped))
            return self._to_first_point(self.w, skipped, optax.safe_increment(self.step))

        if not self.of.skip_nonfinite:
            return proceed()
        return control_flow.cond(all_finite(tree), proceed, skip)
