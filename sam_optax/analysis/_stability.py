"""Stability of the gradient along the ascent step, with and without a random start."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import sam_optax
from sam_optax._internal import hyperparameters as hp
from sam_optax._internal import noise, trees, vectors
from sam_optax._internal.kernel_noise import NoiseScale
from sam_optax._internal.leaf_roles import AxisOverride, StackAxes
from sam_optax.analysis._loss import Loss, LossLike, as_loss, native
from sam_optax.analysis._random import first_words

PAPER_GAMMAS = (0.0, 0.0075**0.5, 0.01**0.5, 0.0125**0.5)
"""γ² = 0.0075, 0.01 and 0.0125, figures 1 and 2 of the R-SAM paper, and none."""


class GradientStability(NamedTuple):
    """Curves over the radius, for several noise scales of the random start.

    Attributes:
      rhos: (radii,) ρ, in units of the weights.
      gammas: (scales,) γ; 0 is no noise.
      cosine: (scales, draws, radii) cosine of g(ŵ) and g(ŵ + ρ g(ŵ)/‖g(ŵ)‖), figure 1 of the
        R-SAM paper; NaN where a gradient is zero.
      loss: (scales, draws, radii) L(ŵ + ρ g(ŵ)/‖g(ŵ)‖), figure 2.
      start_loss: (scales, draws) L(ŵ).
    """

    rhos: jax.Array
    gammas: jax.Array
    cosine: jax.Array
    loss: jax.Array
    start_loss: jax.Array


def gradient_stability(
    loss: LossLike,
    params: optax.Params,
    rhos: Sequence[float],
    gammas: Sequence[float] = PAPER_GAMMAS,
    *,
    draws: int = 4,
    noise_scale: NoiseScale = "relative",
    kernel_axis: AxisOverride = -1,
    stack_axes: StackAxes = 0,
    key: noise.Key | None = None,
) -> GradientStability:
    r"""Measures how stable the gradient is along the ascent step, from w and from random starts.

    .. math::
        \cos\left(g(\hat w),\ g(\hat w + \rho\, g(\hat w)/\|g(\hat w)\|)\right)
        \quad\text{and}\quad
        L(\hat w + \rho\, g(\hat w)/\|g(\hat w)\|),
        \qquad \hat w = w + \delta_0,

    over ρ, with δ₀ as in :func:`sam_optax.rsam`: figures 1 and 2 of its paper. A cosine near 1
    means that the gradient hardly changes along the step. Compare ``start_loss`` with the loss at
    w: if the noise is so large that the network at the start is at chance level, a stable gradient
    there says nothing about the neighbourhood of w. (The text of the paper has N(0, γ² I),
    ``noise_scale="isotropic"``, and the algorithm γ² diag(‖w_j‖), ``"sqrt_norm"``; either may have
    this effect with the figures' γ.) All γ use the same draws, so that curves differ only by the
    size of γ.

    Args:
      loss: a :class:`DatasetLoss`, or a function ``params -> scalar``. The paper's figures use
        BatchNorm in training mode.
      params: pytree of weights w.
      rhos: (radii,) values ρ ≥ 0, in units of the weights. The paper's figures go up to about 0.5.
      gammas: (scales,) values γ ≥ 0. Default 0 and γ² = 0.0075, 0.01, 0.0125, as in the paper.
      draws: number of random starts per γ > 0, an integer ≥ 1. Default 4.
      noise_scale: see :func:`sam_optax.random_start`.
      kernel_axis: see :func:`sam_optax.random_start`.
      stack_axes: see :func:`sam_optax.random_start`.
      key: a JAX PRNG key, or an integer seed, for the noise. Default: always the same one.

    Returns:
      :class:`GradientStability`.

    Raises:
      TypeError: ``loss`` is not callable, or ``key`` is not a PRNG key.
      ValueError: an argument out of range, or no radii or scales.

    Example:
      >>> import jax.numpy as jnp
      >>> from sam_optax import analysis
      >>> curves = analysis.gradient_stability(
      ...     lambda w: jnp.sum(jnp.sin(w)), jnp.zeros(2), [0.0, 1.0, 2.0], [0.0], draws=1)
      >>> print([f"{value:.3f}" for value in curves.loss[0, 0]])
      ['0.000', '1.299', '1.976']

    References:
      Liu et al., `Random Sharpness-Aware Minimization
      <https://openreview.net/forum?id=htUvh7xPoa>`_, 2022, section 3.1.
    """
    measured, words = as_loss(loss), first_words(key)
    params, rhos, gammas = native((params, rhos, gammas))
    hp.check_integer("draws", draws, lower=1)
    for name, values in (("rhos", rhos), ("gammas", gammas)):
        if not len(values):
            raise ValueError(f"{name} must hold at least one value.")
        for value in values:
            hp.check(name, float(value), lower=0, schedule=False)
    pairs = [(g, d) for g, gamma in enumerate(gammas) for d in range(draws if gamma > 0 else 1)]
    found = _curves(
        measured,
        params,
        jnp.asarray(rhos, jnp.float32),
        jnp.asarray([float(gammas[g]) for g, _ in pairs], jnp.float32),
        jnp.asarray([d for _, d in pairs], jnp.int32),
        words,
        noise_scale=noise_scale,
        kernel_axis=kernel_axis,
        stack_axes=stack_axes,
    )
    # Without noise one draw represents all.
    position = {pair: i for i, pair in enumerate(pairs)}
    rows = np.array(
        [[position.get((g, d), position[g, 0]) for d in range(draws)] for g in range(len(gammas))]
    )
    cosine, values, start_loss = (x[rows] for x in found)
    return GradientStability(jnp.asarray(rhos), jnp.asarray(gammas), cosine, values, start_loss)


@functools.partial(jax.jit, static_argnames=("noise_scale", "kernel_axis", "stack_axes"))
def _curves(
    loss: Loss,
    params: optax.Params,
    rhos: jax.Array,
    gammas: jax.Array,
    draws: jax.Array,
    words: jax.Array,
    *,
    noise_scale: NoiseScale,
    kernel_axis: AxisOverride,
    stack_axes: StackAxes,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cosines and losses (pairs, radii), and losses at the starts (pairs,)."""
    moving = trees.inexact_only(params)

    def of_pair(pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        gamma, draw = pair
        method = sam_optax.random_start(
            sam_optax.sam(),
            gamma,
            key=jax.random.key(0),
            noise_scale=noise_scale,
            kernel_axis=kernel_axis,
            stack_axes=stack_axes,
        )
        state = method.init(moving)._replace(key=words)
        start = trees.merge(method.start_fn(moving, state, draw_index=draw), params)
        start_loss, grads = loss.value_and_grad(start)

        def of_radius(rho: jax.Array) -> tuple[jax.Array, jax.Array]:
            sam = sam_optax.sam(rho)
            point, _ = sam.perturb_fn(start, grads, sam.init(start))
            value, there = loss.value_and_grad(point)
            return vectors.cosine(grads, there), value

        return *lax.map(of_radius, rhos), start_loss

    return lax.map(of_pair, (gammas, draws))
