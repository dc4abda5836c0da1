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
        \varepsilon = \rho\, d / \|d\|_2, \qquad
        d = \frac{\delta_0}{\sqrt{\mathbb{E}\|\delta_0\|^2}}
            + \lambda \frac{\hat g}{\|\hat g\|}, \qquad
        \hat g = \nabla L(w + \delta_0), \qquad
        \delta_0 \sim N\left(0, \gamma^2\, \mathrm{diag}(\|w_j\|^2 / n_j)\right).

    It is ``random_start(sam(rho), gamma, lmbda, key=key)``. The noise is relative to the norm of
    each kernel, and both terms have unit length before λ weights them. The paper prints
    ``noise_scale="sqrt_norm", weighting="raw"``, without γ and λ: see :func:`random_start`. γ = 0
    is SAM, bit for bit by default.

    Args:
      rho: radius ρ ≥ 0 of the whole perturbation, noise included. Default 0.05, SAM's.
      gamma: scale γ ≥ 0 of the noise. Default 0.1, this library's choice: a tenth of each kernel's
        norm. 0 is SAM.
      lmbda: weight λ ≥ 0 of the gradient relative to the noise. Default 2, this library's choice:
        the cosines of ε with δ₀ and with ĝ are then 0.45 and 0.89.
      key: a JAX PRNG key, typed or raw, or an integer seed.
      noise_scale: standard deviation of an element of kernel j: ``"relative"`` (default),
        γ ‖w_j‖/√n_j; ``"sqrt_norm"``, γ ‖w_j‖^½; ``"norm"``, γ ‖w_j‖; or ``"isotropic"``, γ.
      weighting: the terms that λ weights: ``"normalized"`` (default), as above;
        ``"normalized_gradient"``, δ₀ + λĝ/‖ĝ‖; or ``"raw"``, δ₀ + λĝ.
      kernel_axis: axis of the output unit, whose indices are the kernels j. Default −1, the layout
        of Flax and Haiku; Equinox and PyTorch need 0. Also a function, see :func:`random_start`.
      stack_axes: number of leading axes that stack layers, as ``nn.scan`` creates them. Default 0.
        Also a function, see :func:`random_start`.
      draw: ``(key, shape, dtype) -> array`` of mean 0 and variance 1, such as
        ``jax.random.normal``. Default ``None``: this library's generator, see
        :func:`random_start`.

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
