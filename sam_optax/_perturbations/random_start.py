"""Random starts: the ascent gradient is taken at a random point near the params."""

import functools
from typing import Any, NamedTuple

import optax
from chex import Array, Numeric
from optax import OptState, Params, Updates

from sam_optax._internal import hyperparameters as hp
from sam_optax._internal import kernel_noise, noise, trees, vectors
from sam_optax._internal.kernel_noise import NoiseScale
from sam_optax._internal.leaf_roles import AxisOverride, StackAxes, check_stack_axes
from sam_optax._internal.types import Leaf, PyTree
from sam_optax._internal.weighting import Weighting, check_weighting, of_terms
from sam_optax._perturbations.perturbation import Perturbation, as_perturbation, require_params


class RandomStartState(NamedTuple):
    """State of :func:`sam_optax.random_start`.

    Attributes:
      key: uint32 key data of the next draw (raw, so that every serializer takes it).
      inner_state: state of the inner perturbation.
    """

    key: Array
    inner_state: OptState


def random_start(
    perturbation: optax.GradientTransformation,
    gamma: hp.Hyperparameter = 0.1,
    lmbda: hp.Hyperparameter = 2.0,
    *,
    key: noise.Key,
    noise_scale: NoiseScale = "relative",
    weighting: Weighting = "normalized",
    kernel_axis: AxisOverride = hp.static_default(-1),
    stack_axes: StackAxes = hp.static_default(0),
    draw: noise.Draw | None = None,
) -> Perturbation:
    r"""Takes the ascent gradient at a random point near the params.

    .. math::
        \varepsilon = \mathrm{perturbation}\left(
            \frac{\delta_0}{\|\delta\|} + \lambda \frac{\hat g}{\|\hat g\|}\right), \quad
        \hat g = \nabla L(w + \delta_0), \quad
        \delta_0 \sim N\left(0, \gamma^2\, \mathrm{diag}(\|w_j\|^2 / n_j)\right),

    with ‖δ‖² = E‖δ₀‖². A kernel j of n_j elements is one output unit: an index of the last axis of
    a leaf with two or more axes; a leaf with fewer is one kernel. So ‖δ_j‖ ≈ γ ‖w_j‖, and λ sets
    the balance of noise and gradient, for kernels and networks of any size. Kernels that are zero,
    such as biases at initialization, get no noise.

    These scales are this library's. The paper prints δ₀ + λĝ with δ₀ ~ N(0, γ² diag(‖w_j‖)), and
    gives no γ or λ for its tables. Read literally (``noise_scale="sqrt_norm", weighting="raw"``),
    with γ = 0.1 and λ = 1, ε is almost pure noise, and the loss at the start is at chance level.

    Args:
      perturbation: maps the direction to ε, such as :func:`sam` or :func:`asam`. It receives the
        direction times ‖ĝ‖/λ, which is ĝ itself for γ = 0.
      gamma: scale γ ≥ 0 of the noise. Default 0.1, this library's choice. 0: no random start.
      lmbda: weight λ ≥ 0 of the gradient relative to the noise. Default 2, this library's choice:
        for large networks and :func:`sam`, the cosines of ε with δ₀ and ĝ are then 0.45 and 0.89,
        so that SAM's radii are suitable.
      key: a JAX PRNG key, typed or raw, or an integer seed.
      noise_scale: standard deviation of an element of kernel j: ``"relative"`` (default),
        γ ‖w_j‖/√n_j; ``"sqrt_norm"``, γ ‖w_j‖^½, the paper's covariance read literally;
        ``"norm"``, γ ‖w_j‖, as in the public code of LPF-SGD; or ``"isotropic"``, γ.
      weighting: ``"normalized"`` (default), δ₀/‖δ‖ + λĝ/‖ĝ‖; ``"normalized_gradient"``,
        δ₀ + λĝ/‖ĝ‖, section 4.6 of the paper; or ``"raw"``, δ₀ + λĝ, equation (7) and algorithm 1.
      kernel_axis: axis of the output unit, or a function ``(path, leaf) -> axis | None`` (``None``:
        one kernel). Default −1, the layout of Flax and Haiku; Equinox and PyTorch need 0.
      stack_axes: number of leading axes that stack layers (``nn.scan``, ``nnx.scan``), each of
        which has its own kernels, or a function ``(path, leaf) -> number``. Default 0.
      draw: ``(key, shape, dtype) -> array`` of independent elements of mean 0 and variance 1, such
        as ``jax.random.rademacher``. Default ``None``: this library's fast generator, normal to
        within 4·10⁻⁴ in distribution, without memory. Leaves of up to 2¹⁶ elements share one draw.

    Returns:
      A :class:`~sam_optax.Perturbation` with a ``start_fn``, which ``optax.chain`` around it would
      lose (an error). Its state is that of ``perturbation`` and one key, from which the noise is
      drawn at the start and again for ε.

    Raises:
      TypeError: ``key`` is neither a seed nor a single PRNG key, or ``draw`` is not a function.
      ValueError: a hyperparameter is out of range, a name is unknown, ``draw`` returns the wrong
        shape, or ``perturbation`` already has a random start.

    Example:
      >>> import jax.numpy as jnp, sam_optax
      >>> method = sam_optax.random_start(sam_optax.asam(), gamma=0.1, key=0)
      >>> params = {"kernel": jnp.ones((3, 2))}
      >>> start = method.start_fn(params, method.init(params))
      >>> bool(jnp.any(start["kernel"] != params["kernel"]))
      True

    References:
      Liu et al., `Random Sharpness-Aware Minimization
      <https://openreview.net/forum?id=htUvh7xPoa>`_, 2022.
    """
    hp.check("gamma", gamma, lower=0)
    hp.check("lmbda", lmbda, lower=0)
    kernel_noise.check_noise_scale(noise_scale)
    check_weighting(weighting)
    check_stack_axes(stack_axes)
    noise.check_key(key)
    if draw is not None and not callable(draw):
        raise TypeError(
            "draw must be a function (key, shape, dtype) -> array, such as jax.random.normal, or "
            f"None for the library's own generator, got {draw!r}."
        )
    inner = as_perturbation(perturbation)
    if inner.has_start:
        raise ValueError("perturbation already has a random start: use only one random_start.")

    def noise_at(
        params: Params, state: RandomStartState, gamma: Numeric, index: Numeric | None
    ) -> tuple[PyTree, PyTree]:
        """E‖δ₀‖² of each kernel in units of γ², and δ₀."""
        squares = kernel_noise.expected_squares(params, noise_scale, kernel_axis, stack_axes)
        words = noise.fold_in(state.key, index)
        return squares, kernel_noise.kernel_noise(params, squares, words, gamma, draw)

    def init_fn(params: Params) -> RandomStartState:
        return RandomStartState(noise.first_key(key), inner.init(params))

    def start_fn(params: Params, state: RandomStartState, gamma: Numeric, **extra: Any) -> Params:
        return trees.add(params, noise_at(params, state, gamma, extra["draw_index"])[1])

    def update_fn(
        updates: Updates,
        state: RandomStartState,
        params: Params,
        gamma: Numeric,
        lmbda: Numeric,
        **extra: Any,
    ) -> tuple[Updates, RandomStartState]:
        require_params("random_start", params, ", with the gradient at start_fn(params, state).")
        axis = extra["norm_axis_name"]
        squares, delta = noise_at(params, state, gamma, extra["draw_index"])

        length = functools.partial(kernel_noise.expected_length, updates, squares, gamma, axis)
        factors = of_terms(weighting, updates, lmbda, length, axis)

        def direction(g: Leaf, d: Array) -> Array:
            wide = trees.widen(g)
            d = vectors.times(d.astype(wide.dtype), *factors.noise)
            return trees.cast_if_range_allows(d + vectors.times(wide, *factors.gradient), g)

        directions = trees.map_inexact(direction, updates, delta)
        eps, inner_state = inner.update(directions, state.inner_state, params, **extra)
        eps = trees.map_inexact(trees.cast_like, eps, updates)
        return eps, RandomStartState(noise.next_key(state.key), inner_state)

    values = {"gamma": gamma, "lmbda": lmbda}
    return Perturbation(
        init_fn, update_fn, start_fn, hyperparameters=values, state_type=RandomStartState
    )
