"""R-SAM: SAM from a random start."""

from sam_optax._internal import hyperparameters as hp
from sam_optax._internal import noise
from sam_optax._internal.kernel_noise import NoiseScale
from sam_optax._internal.leaf_roles import AxisOverride, StackAxes
from sam_optax._internal.weighting import Weighting
from sam_optax._perturbations.perturbation import Perturbation
from sam_optax._perturbations.random_start import random_start
from sam_optax._perturbations.sam import sam


def rsam(
    rho: hp.Hyperparameter = 0.05,
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
    r"""Random SAM: takes the ascent gradient of :func:`sam` at a random point near the params.

    .. math::
        \varepsilon = \rho\, d / \|d\|_2, \quad \hat g = \nabla L(w + \delta_0), \quad
        d = \frac{\delta_0}{\sqrt{\mathbb{E}\|\delta_0\|^2}} + \lambda\frac{\hat g}{\|\hat g\|},
        \delta_0 \sim N\left(0, \gamma^2\, \mathrm{diag}(\|w_j\|^2 / n_j)\right).

    It is ``random_start(sam(rho), gamma, lmbda, key=key)``: see there for the kernels j, and for
    the noise that the paper prints. γ = 0 is SAM, by default bit for bit.

    Args:
      rho: radius ρ ≥ 0 of the whole perturbation, noise included. Default 0.05, SAM's.
      gamma: scale γ ≥ 0 of the noise, relative to each kernel. Default 0.1, this library's choice.
      lmbda: weight λ ≥ 0 of the gradient relative to the noise. Default 2, this library's choice.
      key: a JAX PRNG key, typed or raw, or an integer seed.
      noise_scale: deviation of an element of kernel j: ``"relative"`` (default), γ ‖w_j‖/√n_j;
        ``"sqrt_norm"``, γ ‖w_j‖^½; ``"norm"``, γ ‖w_j‖; or ``"isotropic"``, γ.
      weighting: ``"normalized"`` (default), as above; ``"normalized_gradient"``, δ₀ + λĝ/‖ĝ‖; or
        ``"raw"``, δ₀ + λĝ.
      kernel_axis: axis of the output unit, or a function. Default −1, the layout of Flax.
      stack_axes: number of leading axes that stack layers, or a function. Default 0.
      draw: ``(key, shape, dtype) -> array`` of variance 1. Default: this library's generator.

    Returns:
      A :class:`~sam_optax.Perturbation` with a ``start_fn``; its state is one key.

    Raises:
      TypeError: ``key`` is neither a seed nor a single PRNG key.
      ValueError: a hyperparameter out of range, or an unknown name.

    Example:
      >>> import optax, sam_optax
      >>> tx = sam_optax.sharpness_aware(optax.adamw(1e-3), sam_optax.rsam(rho=0.05, key=0))

    References:
      Liu et al., `Random Sharpness-Aware Minimization
      <https://openreview.net/forum?id=htUvh7xPoa>`_, 2022.
    """
    return random_start(
        sam(rho),
        gamma,
        lmbda,
        key=key,
        noise_scale=noise_scale,
        weighting=weighting,
        kernel_axis=kernel_axis,
        stack_axes=stack_axes,
        draw=draw,
    )
