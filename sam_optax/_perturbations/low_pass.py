"""LPF-SGD: the gradient of the loss smoothed by a Gaussian kernel."""

from typing import Any

import optax
from optax import Params, Updates

from sam_optax._internal import hyperparameters as hp
from sam_optax._internal import noise, trees
from sam_optax._internal.kernel_noise import NoiseScale
from sam_optax._internal.leaf_roles import AxisOverride, StackAxes
from sam_optax._internal.start_state import StartState
from sam_optax._perturbations.perturbation import Perturbation, require_params
from sam_optax._perturbations.random_start import random_start


def low_pass(
    gamma: hp.Hyperparameter = 0.002,
    samples: int = hp.static_default(1),
    *,
    key: noise.Key,
    noise_scale: NoiseScale = "norm",
    kernel_axis: AxisOverride = hp.static_default(-1),
    stack_axes: StackAxes = hp.static_default(0),
    draw: noise.Draw | None = None,
) -> Perturbation:
    r"""LPF-SGD: descends along the mean gradient at random points near the params, without ascent.

    .. math::
        \textstyle\frac{1}{M} \sum_{i=1}^{M} \nabla L(w + \delta_i), \quad
        \delta_i \sim N(0, \gamma^2\, \mathrm{diag}(\|w_j\|^2)),

    for kernels j as in :func:`random_start`. Each sample costs one gradient on the whole batch. The
    paper draws one sample for each of M parts of the batch, at the total cost of one gradient:
    ``sharpness_aware(base_tx, low_pass(gamma, key=key), groups=M)``.

    Args:
      gamma: scale γ ≥ 0 of the noise. Default 0.002, this library's choice. The public code
        increases γ during training, which an optax schedule can do.
      samples: M, an integer ≥ 1. Default 1.
      key: a JAX PRNG key, typed or raw, or an integer seed.
      noise_scale: see :func:`random_start`. Default ``"norm"``, γ ‖w_j‖, the public code's. The
        best γ then depends on the size of the network, with ``"relative"`` it does not.
      kernel_axis: see :func:`random_start`.
      stack_axes: see :func:`random_start`.
      draw: see :func:`random_start`.

    Returns:
      A :class:`~sam_optax.Perturbation` with a ``start_fn`` that is the perturbed point. Its state
      is one key. ``update`` does not use ``grads``: pass ``None``.

    Raises:
      TypeError: ``key`` is neither a seed nor a single PRNG key, or ``samples`` is not an integer.
      ValueError: a hyperparameter out of range.

    Example:
      >>> import jax, optax, sam_optax
      >>> tx = sam_optax.sharpness_aware(
      ...     optax.sgd(0.1), sam_optax.low_pass(gamma=0.01, samples=4, key=jax.random.key(0)))

    References:
      Bisla et al., `Low-Pass Filtering SGD for Recovering Flat Optima in the Deep Learning
      Optimization Landscape <https://arxiv.org/abs/2201.08025>`_, 2022.
    """
    hp.check_integer("samples", samples, lower=1)
    start = random_start(
        optax.identity(),
        gamma,
        0.0,  # with λ = 0, δ₀ + λĝ is only the noise
        key=key,
        noise_scale=noise_scale,
        weighting="raw",
        kernel_axis=kernel_axis,
        stack_axes=stack_axes,
        draw=draw,
    )

    def update_fn(
        updates: Updates, state: StartState, params: Params | None, **extra: Any
    ) -> tuple[Updates, StartState]:
        require_params("low_pass", params)
        zeros = trees.map_inexact(trees.zeros_like, params if updates is None else updates)
        return start.update(zeros, state, params, **extra)

    return Perturbation(
        start.init, update_fn, start.start_fn, single_pass=True, samples=int(samples)
    )
