"""SAMPa: gradients at two points that are known in advance, one on each of two devices."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from chex import Array
from jax import lax
from optax import OptState, Params, Updates

from sam_optax._combinators import checks
from sam_optax._combinators.gradient_functions import Evaluation, Evaluations, GradFn, evaluations
from sam_optax._descent.mix_gradients import mix
from sam_optax._internal import hyperparameters as hp
from sam_optax._internal import roles, trees
from sam_optax._internal.devices import AxisName, require_bound, shows_variation
from sam_optax._internal.types import PyTree
from sam_optax._perturbations.perturbation import Perturbation, perturbed_params


class SimultaneousState(NamedTuple):
    """State of :func:`sam_optax.simultaneous`.

    Attributes:
      step: int32 scalar, the number of steps taken.
      ahead_grads: the last gradient at y, with the structure, shapes and dtypes of the params;
        ``None`` in place of non-float leaves. 0 before the first step.
      perturbation_state: state of the perturbation.
      base_state: state of the base optimizer; with a descent the pair ``(descent's, base's)``.
    """

    step: Array
    ahead_grads: Updates
    perturbation_state: OptState
    base_state: OptState


def simultaneous(
    base_tx: optax.GradientTransformation,
    perturbation: optax.GradientTransformation,
    lmbda: hp.Hyperparameter = 0.2,
    *,
    descent: optax.GradientTransformation | None = None,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""SAMPa: evaluates both gradients of a step in parallel, on two devices as fast as SGD.

    .. math::
        \begin{aligned}
        \tilde w_t &= w_t + \mathrm{perturbation}(\nabla L(y_t)), \\
        y_{t+1} &= w_t + \mathrm{base\_tx}(\nabla L(y_t)), \\
        w_{t+1} &= w_t + \mathrm{base\_tx}\big((1 - \lambda)\, \nabla L(\tilde w_t)
            + \lambda\, \nabla L(y_{t+1})\big).
        \end{aligned}

    ∇L(y_t) is known from the previous step, so neither of the two gradients depends on the other.
    Only the last line changes the base optimizer's state. The first step has no ∇L(y₀): ε = 0 and
    y₁ = w₀.

    ``update(None, state, params, grad_fn=grad_fn, previous_grad_fn=previous_grad_fn)`` takes two
    gradient functions, as in the public code: ∇L(w̃_t) is on the batch of the *previous* step, as
    ∇L(y_t) was, and ∇L(y_{t+1}) on the batch of this step. At the first step both are on its batch.

    With ``axis_name``, an axis of two devices in ``jax.shard_map`` or ``jax.pmap`` on which params
    and state are replicated, each device evaluates one gradient, with its own ``grad_fn``: that of
    device 0 is on the previous batch, for w̃, and that of device 1 on this step's, for y. They
    exchange one gradient each (with ``check_vma=True`` they sum two).

    Args:
      base_tx: the base optimizer, any optax transformation.
      perturbation: maps the gradient at y to ε, such as :func:`sam`.
      lmbda: λ in [0, 1], or an optax schedule of it. Default 0.2, as in the public code (which
        never perturbs for λ = 0).
      descent: as in :func:`sharpness_aware`; its ascent gradient is ∇L(y_t).
      axis_name: the axis of two devices; ``()`` if ``grad_fn`` averages over another axis.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` with a :class:`SimultaneousState`.

    Raises:
      TypeError: an argument is not a gradient transformation.
      ValueError: ``lmbda`` is out of range, or the perturbation has a start; in ``update``, an
        argument is missing or not allowed, or the axis does not have two devices.

    Example:
      >>> import jax, jax.numpy as jnp, optax, sam_optax
      >>> tx = sam_optax.simultaneous(optax.sgd(0.25), sam_optax.sam(rho=1.0), lmbda=0.0)
      >>> x = jnp.array(4.0)
      >>> state = tx.init(x)
      >>> grad_fn = jax.grad(lambda x: x**2)  # on one batch, for brevity
      >>> for _ in range(2):
      ...     updates, state = tx.update(
      ...         None, state, x, grad_fn=grad_fn, previous_grad_fn=grad_fn)
      ...     x = optax.apply_updates(x, updates)
      ...     print(x)  # 4 − 2 · 4/4, then 2 − 2 · (2 + 1)/4
      2.0
      0.5

    References:
      Xie et al., `SAMPa: Sharpness-aware Minimization Parallelized
      <https://arxiv.org/abs/2410.10683>`_, 2024.
    """
    method, optimizer = checks.roles_of(base_tx, perturbation, descent)
    hp.check("lmbda", lmbda, lower=0, upper=1, upper_allowed=True)
    if method.has_start:
        raise ValueError(
            "the perturbation has a start (random_start, low_pass, momentum_start), but "
            "simultaneous takes the ascent gradient at y: use sharpness_aware."
        )
    step = _Step(method, optimizer, lmbda, axis_name)
    return optax.GradientTransformationExtraArgs(step.init, step.update)


@dataclasses.dataclass(frozen=True)
class _Step:
    """One training step; the attributes hold the arguments of :func:`simultaneous`."""

    method: Perturbation
    optimizer: roles.Descend
    lmbda: hp.Hyperparameter
    axis_name: AxisName | None

    def init(self, params: Params) -> SimultaneousState:
        """The state before the first step."""
        checks.check_params(params, "simultaneous")
        return SimultaneousState(
            step=jnp.zeros((), jnp.int32),
            ahead_grads=trees.inexact_zeros(params),
            perturbation_state=self.method.init(params),
            base_state=self.optimizer.init(params),
        )

    def update(
        self,
        updates: Updates | None,
        state: SimultaneousState,
        params: Params | None = None,
        *,
        grad_fn: GradFn | None = None,
        previous_grad_fn: GradFn | None = None,
        **extra: Any,
    ) -> tuple[Updates, SimultaneousState]:
        """Both points follow from ∇L(y_t), which is known; then both gradients are evaluated."""
        checks.check_params(params, "simultaneous")
        checks.check_state(state, SimultaneousState)
        self._check_functions(previous_grad_fn)
        require_bound("axis_name", self.axis_name)
        before = state.perturbation_state
        g = trees.merge(state.ahead_grads, jax.tree.map(trees.zeros_like, params))
        base_state = self.optimizer.base_state(state.base_state)
        arguments = roles.for_perturbation(extra, training_step=state.step, base_state=base_state)
        point, moved = perturbed_params(self.method, params, g, before, None, arguments)

        def descend(grads: Updates, perturbed: bool) -> tuple[Updates, OptState]:
            added = {"ascent_grads": g, "perturbation_state": before, "training_step": state.step}
            added["perturbed"] = perturbed
            return self.optimizer.update(grads, state.base_state, params, added, extra)

        trial, _ = descend(g, False)
        trial = trees.map_inexact(lambda u: jnp.where(state.step > 0, u, jnp.zeros_like(u)), trial)
        ahead = trees.add(params, trial)
        loss = evaluations(params, grad_fn, None, previous_grad_fn, extra, once=True)
        sharp, seen = self._gradients(loss, point, ahead)
        share = 1 - jnp.asarray(hp.evaluate(self.lmbda, state.step))
        moves, new_base_state = descend(mix(sharp, seen, share), True)
        return moves, SimultaneousState(
            step=optax.safe_increment(state.step),
            ahead_grads=trees.cast_tree_like(seen, state.ahead_grads),
            perturbation_state=moved,
            base_state=new_base_state,
        )

    def _gradients(
        self, loss: Evaluations, point: Params, ahead: Params
    ) -> tuple[Updates, Updates]:
        """∇L(w̃_t) and ∇L(y_{t+1})."""
        if self.axis_name:
            return _one_each(loss.sharp, point, ahead, self.axis_name)
        sharp, seen = loss.ascent(point).grads, loss.sharp(ahead).grads
        if self.axis_name is None:
            checks.warn_of_drift("simultaneous", sharp)
        return sharp, seen

    def _check_functions(self, previous_grad_fn: GradFn | None) -> None:
        """Raises unless there is one gradient function for each gradient."""
        if self.axis_name and previous_grad_fn is not None:
            raise ValueError(
                "previous_grad_fn cannot be used with axis_name, under which each device has a "
                "grad_fn of its own: device 0 that of the previous batch."
            )
        if not self.axis_name and previous_grad_fn is None:
            raise ValueError(
                "simultaneous needs previous_grad_fn, the gradient on the batch of the previous "
                "step: call update(None, state, params, grad_fn=grad_fn, previous_grad_fn="
                "previous_grad_fn), at the first step with grad_fn for both."
            )


def _one_each(
    evaluate: Evaluation, point: Params, ahead: Params, axis_name: AxisName
) -> tuple[Updates, Updates]:
    """The gradients at both points, each of which one of two devices evaluates."""
    if (size := lax.psum(1, axis_name)) != 2:
        raise ValueError(
            f"axis_name={axis_name!r} must be an axis of two devices, one per gradient, got {size}."
        )
    first = lax.axis_index(axis_name) == 0

    def chosen(a: PyTree, b: PyTree) -> PyTree:
        return trees.map_inexact(lambda x, y: jnp.where(first, x, y), a, b)

    def sum_of(mine: jax.Array) -> Updates:
        return trees.map_inexact(
            lambda g: lax.psum(jnp.where(mine, g, jnp.zeros_like(g)), axis_name), own
        )

    own = evaluate(chosen(point, ahead)).grads
    if shows_variation(axis_name):  # only a sum proves that both devices hold the same
        return sum_of(first), sum_of(~first)
    other = trees.map_inexact(lambda g: lax.ppermute(g, axis_name, [(0, 1), (1, 0)]), own)
    return chosen(own, other), chosen(other, own)
