"""LookSAM: SAM's correction of the gradient, computed every k steps and reused in between."""

import optax

from sam_optax._combinators.sharpness_aware import sharpness_aware
from sam_optax._descent.reuse_orthogonal import reuse_orthogonal
from sam_optax._internal import hyperparameters as hp
from sam_optax._perturbations.sam import sam
from sam_optax._schedules.when import every


def looksam(
    base_tx: optax.GradientTransformation,
    rho: hp.Hyperparameter = 0.05,
    k: int = hp.static_default(5),
    alpha: hp.Hyperparameter = 0.7,
) -> optax.GradientTransformationExtraArgs:
    r"""LookSAM: runs SAM at every k-th step and reuses its correction of the gradient in between.

    .. math::
        g_t = \begin{cases}
            g_s = \nabla L(w + \rho\, g/\|g\|) & t \bmod k = 0, \\
            g + \alpha\, \|g\|\, g_v/\|g_v\| & \text{else,}
        \end{cases}

    where g = ∇L(w) and g_v is the component of g_s orthogonal to g. A step costs 1 + 1/k gradients
    on average, and the state one copy of the gradient. It is short for
    ``sharpness_aware(optax.chain(reuse_orthogonal(alpha), base_tx), sam(rho), when=every(k))``: use
    that composition for another perturbation or for further options.

    Args:
      base_tx: the base optimizer, any optax transformation.
      rho: radius ρ ≥ 0. Default 0.05, SAM's.
      k: period of the SAM steps, an integer ≥ 1. Default 5; 1 is SAM.
      alpha: see :func:`reuse_orthogonal`.

    Returns:
      The same kind of transformation as :func:`sharpness_aware`, used in the same way.

    Raises:
      TypeError: ``base_tx`` is not a gradient transformation.
      ValueError: a hyperparameter out of range.

    Example:
      >>> import optax, sam_optax
      >>> tx = sam_optax.looksam(optax.adamw(1e-3), rho=0.1, k=5, alpha=0.7)

    References:
      Liu et al., `Towards Efficient and Scalable Sharpness-Aware Minimization
      <https://arxiv.org/abs/2203.02714>`_, 2022.
    """
    hp.check_transformation("base_tx", base_tx)
    return sharpness_aware(optax.chain(reuse_orthogonal(alpha), base_tx), sam(rho), when=every(k))
