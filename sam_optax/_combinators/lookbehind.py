"""Lookbehind-SAM: several ascents and descents on one batch, and an interpolation back."""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from chex import Array
from optax import OptState, Params, Updates

from sam_optax._combinators import checks
from sam_optax._combinators.gradient_functions import GradFn, evaluations
from sam_optax._internal import control_flow, devices, roles, trees, vectors
from sam_optax._internal import hyperparameters as hp
from sam_optax._internal.checks import require_gradient
from sam_optax._perturbations.perturbation import Perturbation, perturbed_params


class LookbehindState(NamedTuple):
    """State of :func:`sam_optax.lookbehind`.

    Attributes:
      step: int32 scalar, the number of training steps taken.
      perturbation_state: state of the perturbation, updated k times per step.
      base_state: state of the base optimizer, updated k times per step.
    """

    step: Array
    perturbation_state: OptState
    base_state: OptState


def lookbehind(
    base_tx: optax.GradientTransformation,
    perturbation: optax.GradientTransformation,
    k: int = hp.static_default(5),
    alpha: hp.Hyperparameter | Literal["adaptive"] = 0.5,
    *,
    axis_name: devices.AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Lookbehind-SAM: k ascents on one batch, a step of the base optimizer after each of them.

    .. math::
        p_i = p_{i-1} + \mathrm{perturbation}(\nabla L(p_{i-1})), \qquad
        f_i = f_{i-1} + \mathrm{base\_tx}(\nabla L(p_i)), \qquad p_0 = f_0 = w,

    for i = 1, …, k, and then :math:`w \leftarrow w + \alpha\, (f_k - w)`. The base optimizer acts
    on the fast weights f: its moments change k times per step. ``k=1, alpha=1`` is SAM.

    ``update(grads, state, params, grad_fn=grad_fn)`` takes the gradient on the step's batch as
    :func:`sharpness_aware` does, and evaluates it k + 1 times, or k times if ``grads``, the one at
    the params, is given. (The public code evaluates the gradient at each p_i twice.)

    Args:
      base_tx: the base optimizer, any optax transformation.
      perturbation: maps a gradient to ε, such as :func:`sam` or :func:`asam`, without a start.
      k: number of ascents, an integer ≥ 1. Default 5, the public code's.
      alpha: α in [0, 1], or an optax schedule of it. Default 0.5, the public code's.
        ``"adaptive"`` is (cos(f₁ − w, f_k − w) + 1)/2 for each leaf, as in the public code.
      axis_name: axis (or axes) of data-parallel devices, whose gradients are averaged; ``()`` says
        that ``grad_fn`` averages them itself.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` with a :class:`LookbehindState`.

    Raises:
      TypeError: an argument is not a gradient transformation, or in another's place.
      ValueError: ``k`` or ``alpha`` is out of range, or the perturbation has a start; in
        ``update``, ``params`` or the gradient function is missing.

    Example:
      >>> import jax, jax.numpy as jnp, optax, sam_optax
      >>> tx = sam_optax.lookbehind(optax.sgd(0.125), sam_optax.sam(rho=1.0), k=2, alpha=0.5)
      >>> x = jnp.array(2.0)
      >>> updates, _ = tx.update(None, tx.init(x), x, grad_fn=jax.grad(lambda x: x**2))
      >>> print(updates)  # −(2 · 3 + 2 · 4)/8 · 0.5
      -0.875

    References:
      Mordido et al., `Lookbehind-SAM: k steps back, 1 step forward
      <https://arxiv.org/abs/2307.16704>`_, 2024.
    """
    method, optimizer = checks.roles_of(base_tx, perturbation, None)
    hp.check_integer("k", k, lower=1)
    if alpha != "adaptive":
        hp.check("alpha", alpha, lower=0, upper=1, upper_allowed=True)
    if method.has_start:
        raise ValueError(
            "perturbation must not have a start (random_start, low_pass, momentum_start): "
            "lookbehind ascends from the point that it has reached."
        )
    step = _Step(method, optimizer, int(k), alpha, axis_name)
    return optax.GradientTransformationExtraArgs(step.init, step.update)


class _Reached(NamedTuple):
    """Both trajectories after some ascents."""

    point: Params
    fast: Params
    grads: Updates
    perturbation_state: OptState
    base_state: OptState


@dataclasses.dataclass(frozen=True)
class _Step:
    """One training step; the attributes are the arguments of :func:`lookbehind`."""

    method: Perturbation
    optimizer: roles.Descend
    k: int
    alpha: hp.Hyperparameter | Literal["adaptive"]
    axis_name: devices.AxisName | None

    def init(self, params: Params) -> LookbehindState:
        """The state before the first step."""
        checks.check_params(params, "lookbehind")
        return LookbehindState(
            jnp.zeros((), jnp.int32), self.method.init(params), self.optimizer.init(params)
        )

    def update(
        self,
        updates: Updates | None,
        state: LookbehindState,
        params: Params | None = None,
        *,
        grad_fn: GradFn | None = None,
        **extra: Any,
    ) -> tuple[Updates, LookbehindState]:
        """Takes k ascents from w, each with a step of the fast weights, and a part of their way."""
        checks.check_params(params, "lookbehind")
        checks.check_state(state, LookbehindState)
        devices.require_bound("axis_name", self.axis_name)
        loss = evaluations(params, grad_fn, None, None, extra, once=False)

        def gradient(p: Params) -> Updates:
            own = loss.sharp(devices.local(p, self.axis_name)).grads
            return devices.pmean(own, self.axis_name)

        def ascend(reached: _Reached) -> _Reached:
            p, f, g, perturbation_state, base_state = reached
            known = roles.for_perturbation(extra, training_step=state.step, base_state=base_state)
            p, perturbation_state = perturbed_params(
                self.method, p, g, perturbation_state, None, known
            )
            g = gradient(p)
            moves, new_base_state = self.optimizer.update(g, base_state, f, {}, extra)
            new_base_state = jax.tree.map(trees.cast_state_like, new_base_state, base_state)
            return _Reached(p, trees.add(f, moves), g, perturbation_state, new_base_state)

        if updates is None:
            g = gradient(params)
        else:
            require_gradient("grads", updates, params)
            devices.check_local(updates, self.axis_name)
            g = devices.pmean(updates, self.axis_name)
        first = ascend(_Reached(params, params, g, state.perturbation_state, state.base_state))
        if self.axis_name is None:
            checks.warn_of_drift("lookbehind", first.grads)
        last = control_flow.repeat(self.k - 1, ascend, first)
        way = trees.displacement(g, params, last.fast)
        shares = self._shares(trees.displacement(g, params, first.fast), way, state.step)
        moves = jax.tree.map(vectors.rescaled, way, shares)
        return trees.merge(moves, jax.tree.map(trees.zeros_like, g)), LookbehindState(
            optax.safe_increment(state.step), last.perturbation_state, last.base_state
        )

    def _shares(self, first: Updates, way: Updates, step: jax.Array) -> Updates:
        """α of each leaf, from its first step and from its whole way."""
        if self.alpha != "adaptive":
            alpha = hp.evaluate(self.alpha, step)
            return jax.tree.map(lambda leaf: alpha, way)
        return jax.tree.map(lambda a, b: (vectors.angle(a, b).cosine + 1) / 2, first, way)
