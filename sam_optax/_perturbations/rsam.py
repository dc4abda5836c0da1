"""R-SAM: SAM from a random start."""

from sam_optax._internal import hyperparameters as hp
from sam_optax._internal import noise, trees
from sam_optax._internal.kernel_noise import NoiseScale
from sam_optax._internal.leaf_roles import AxisOverride, StackAxes
from sam_optax._internal.weighting import Weighting
from sam_optax._perturbations.perturbation import Perturbation
from sam_optax._perturbations.random_start import random_start_cast
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
        \varepsilon = \rho\, d / \|d\|_2, \qquad
        d = \frac{\delta_0}{\|\delta\|} + \lambda \frac{\hat g}{\|\hat g\|}, \qquad
        \hat g = \nabla L(w + \delta_0), \qquad
        \delta_0 \sim N\left(0, \gamma^2\, \mathrm{diag}(\|w_j\|^2 / n_j)\right),

    with ‖δ‖² = E‖δ₀‖²: the noise is relative to the norm of each kernel, and both terms have unit
    length before λ weights them. The paper prints ``noise_scale="sqrt_norm", weighting="raw"``,
    without γ and λ: see :func:`random_start`. γ = 0 is SAM, bit for bit by default.

    Args:
      rho: radius ρ ≥ 0 of the whole perturbation, noise included. Default 0.05, SAM's.
      gamma: see :func:`random_start`.
      lmbda: see :func:`random_start`.
      key: see :func:`random_start`.
      noise_scale: see :func:`random_start`.
      weighting: see :func:`random_start`.
      kernel_axis: see :func:`random_start`.
      stack_axes: see :func:`random_start`.
      draw: see :func:`random_start`.

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
    return random_start_cast(
        sam(rho),
        trees.cast_if_range_allows,
        gamma=gamma,
        lmbda=lmbda,
        key=key,
        noise_scale=noise_scale,
        weighting=weighting,
        kernel_axis=kernel_axis,
        stack_axes=stack_axes,
        draw=draw,
    )
