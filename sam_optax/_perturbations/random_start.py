"""Random starts: the ascent gradient is taken at a random point near the params."""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from sam_optax._internal import hyperparameters as hp
from sam_optax._internal import noise as noise_of
from sam_optax._internal import trees
from sam_optax._internal.leaf_roles import AxisOverride, unit_axes, unit_norm
from sam_optax._internal.steepest_ascent import steepest_ascent
from sam_optax._perturbations.perturbation import Perturbation, as_perturbation


class RandomStartState(NamedTuple):
    """State of :func:`sam_optax.random_start`.

    Attributes:
      key: uint32 key data of the next draw (raw, so that every serializer takes it).
      inner_state: state of the perturbation that follows the start.
      schedule: :class:`~sam_optax.ScheduleState` if a hyperparameter is a schedule, else
        ``optax.EmptyState``.
    """

    key: chex.Array
    inner_state: optax.OptState
    schedule: Any


def random_start(
    perturbation: optax.GradientTransformation,
    gamma: hp.Hyperparameter = 0.1,
    lmbda: hp.Hyperparameter = 1.0,
    *,
    key: chex.PRNGKey,
    norm_power: float = 0.5,
    kernel_axis: AxisOverride = hp.static_default(-1),
    normalize_gradient: bool = False,
) -> Perturbation:
    r"""Takes the ascent gradient at a random point near the params.

    .. math::
        \delta_0 \sim N(0, \gamma^2\, \mathrm{diag}(\|w_j\|)), \qquad
        \hat g = \nabla L(w + \delta_0), \qquad
        \varepsilon = \mathrm{perturbation}(\delta_0 + \lambda \hat g).

    A kernel j is one output unit: an index of the last axis of a leaf with two or more axes; a
    leaf with fewer is one kernel. The second argument of N is a covariance, so the standard
    deviation is γ ‖w_j‖^½.

    The noise is drawn at the start and again for ε, from one key in the state; it is never held.
    It is a counter-based draw of this library's own, normal to within 4·10⁻⁴ in distribution, not
    the stream of ``jax.random``.

    Args:
      perturbation: what maps δ₀ + λĝ to ε, such as :func:`sam` or :func:`asam`.
      gamma: scale γ ≥ 0 of the noise. Default .1; the paper's figures use γ² = .0075 to .0125.
        0 is ``perturbation`` without a random start.
      lmbda: weight λ ≥ 0 of the gradient against the noise. Default 1, as in equation (7) with
        both terms on equal footing; the paper does not print its value.
      key: a JAX PRNG key, typed or raw.
      norm_power: power k of the kernel norm in the standard deviation γ ‖w_j‖^k. Default ½, the
        paper's covariance. 1 makes the noise scale with the weights (as in the public code of
        LPF-SGD); 0 is isotropic.
      kernel_axis: axis of the output unit. Default −1, the layout of Flax and Haiku; Equinox and
        PyTorch need 0. A function ``(path, leaf) -> axis | None`` decides leaf by leaf (``None``:
        one kernel).
      normalize_gradient: uses λ ĝ/‖ĝ‖ in place of λ ĝ, as the paper's section 4.6 writes, so that
        λ weighs the same for any scale of the loss. Default False, equation (7) and algorithm 1.

    Returns:
      A :class:`~sam_optax.Perturbation` with a ``start_fn``. Its state is one key beside that of
      ``perturbation``. Wrapping it in ``optax.chain`` would lose the start, and raises.

    Raises:
      TypeError: ``key`` is not a single PRNG key.
      ValueError: a hyperparameter out of range, or ``perturbation`` has a random start already.

    Example:
      >>> import jax, jax.numpy as jnp, sam_optax
      >>> method = sam_optax.random_start(sam_optax.asam(), gamma=0.1, key=jax.random.key(0))
      >>> params = {"kernel": jnp.ones((3, 2))}
      >>> state = method.init(params)
      >>> start = method.start_fn(params, state)
      >>> bool(jnp.any(start["kernel"] != params["kernel"]))
      True

    References:
      Liu et al., `Random Sharpness-Aware Minimization
      <https://openreview.net/forum?id=htUvh7xPoa>`_, 2022.
    """
    return random_start_cast(
        perturbation,
        gamma,
        lmbda,
        key,
        norm_power,
        kernel_axis,
        normalize_gradient,
        trees.cast_like,
    )


def random_start_cast(
    perturbation: optax.GradientTransformation,
    gamma: hp.Hyperparameter,
    lmbda: hp.Hyperparameter,
    key: chex.PRNGKey,
    norm_power: float,
    kernel_axis: AxisOverride,
    normalize_gradient: bool,
    cast: Callable[[jax.Array, Any], jax.Array],
) -> Perturbation:
    """:func:`random_start`, where ``cast`` gives δ₀ + λĝ the dtype of the gradient."""
    hp.check("gamma", gamma, lower=0)
    hp.check("lmbda", lmbda, lower=0)
    hp.check("norm_power", norm_power, lower=0, schedule=False)
    noise_of.check_key(key)
    inner = as_perturbation(perturbation)
    if inner.has_start:
        raise ValueError("perturbation has a random start already: use one random_start only.")

    def noise(params: optax.Params, key: chex.Array, step: chex.Numeric | None) -> optax.Params:
        """δ₀, in float32 or wider."""
        gamma_t = jnp.asarray(hp.evaluate(gamma, step)).astype(jnp.float32)

        def scale(w: Any, axis: int | None, z: jax.Array) -> jax.Array:
            w = trees.widen(w)
            norm = unit_norm(jnp.abs(w), axis)
            if isinstance(norm_power, float) and norm_power == 0.5:
                std = jnp.sqrt(norm)  # compiles and runs faster than a power
            else:
                std = norm ** jnp.asarray(norm_power).astype(norm.dtype)
            return std.astype(w.dtype) * z.astype(w.dtype)

        axes = unit_axes(params, kernel_axis, min_ndim=2)
        return trees.map_inexact(scale, params, axes, noise_of.normal_tree(key, params, gamma_t))

    def init_fn(params: optax.Params) -> RandomStartState:
        return RandomStartState(
            key=noise_of.first_key(key),
            inner_state=inner.init(params),
            schedule=hp.init_schedules(gamma, lmbda),
        )

    def start_fn(
        params: optax.Params,
        state: RandomStartState,
        *,
        training_step: chex.Numeric | None = None,
        draw_index: chex.Numeric | None = None,
        **extra: Any,
    ) -> optax.Params:
        del extra
        step = hp.step_of(state.schedule, training_step)
        return trees.add(params, noise(params, noise_of.fold_in(state.key, draw_index), step))

    def update_fn(
        updates: optax.Updates,
        state: RandomStartState,
        params: optax.Params | None = None,
        *,
        training_step: chex.Numeric | None = None,
        draw_index: chex.Numeric | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, RandomStartState]:
        if params is None:
            raise ValueError(
                "random_start needs the params: call update(grads, state, params), with the "
                "gradient at start_fn(params, state)."
            )
        step = hp.step_of(state.schedule, training_step)
        lmbda_t = hp.evaluate(lmbda, step)
        delta = noise(params, noise_of.fold_in(state.key, draw_index), step)
        if normalize_gradient:
            updates, lmbda_t = steepest_ascent(updates, None, lmbda_t, p=2), 1.0

        def direction(g: Any, d: jax.Array) -> jax.Array:
            wide = trees.widen(g)
            return cast(d.astype(wide.dtype) + jnp.asarray(lmbda_t).astype(wide.dtype) * wide, g)

        eps, inner_state = inner.update(
            trees.map_inexact(direction, updates, delta),
            state.inner_state,
            params,
            training_step=training_step,
            draw_index=draw_index,
            **extra,
        )
        eps = trees.map_inexact(trees.cast_like, eps, updates)
        return eps, RandomStartState(
            noise_of.next_key(state.key), inner_state, hp.advance(state.schedule, step)
        )

    return Perturbation(init_fn, update_fn, start_fn, state_type=RandomStartState)
