"""Stable SAM: the sharp gradient with the length of the ascent gradient."""

import jax.numpy as jnp
import optax
from chex import Numeric
from optax import Updates

from sam_optax._descent.descent import of_both_gradients, where_perturbed
from sam_optax._internal import vectors
from sam_optax._internal.devices import AxisName


def match_ascent_norm() -> optax.GradientTransformationExtraArgs:
    r"""Stable SAM: rescales the sharp gradient to the length of the ascent gradient.

    .. math::
        \frac{\|g\|}{\|g_s\|}\, g_s,

    with g the ascent gradient and g_s the sharp one, each as one vector over the whole tree. Near
    saddle points and in flat regions g_s can be much shorter or longer than g; with matched
    lengths, SAM can use the learning rates of the base optimizer. If g_s = 0, it stays 0.

    Stable SAM is ``sharpness_aware(base, sam(rho), descent=match_ascent_norm())``.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` without state.

    Raises:
      ValueError: in ``update``, ``ascent_grads`` is missing.

    Example:
      >>> import jax.numpy as jnp, sam_optax
      >>> tx = sam_optax.match_ascent_norm()
      >>> g, g_sharp = jnp.array([1.0, 0.0]), jnp.array([3.0, 4.0])
      >>> updates, _ = tx.update(g_sharp, tx.init(g), ascent_grads=g)
      >>> print(f"{updates[0]:.1f} {updates[1]:.1f}")
      0.6 0.8

    References:
      Tan et al., `Stabilizing Sharpness-Aware Minimization Through A Simple Renormalization
      Strategy <https://arxiv.org/abs/2401.07250>`_, 2024.
    """

    def combine(g_s: Updates, g: Updates, perturbed: Numeric, axis: AxisName | None) -> Updates:
        wanted, length = vectors.norm(g, axis), vectors.norm(g_s, axis)
        ratio = where_perturbed(perturbed, wanted / jnp.where(length > 0, length, 1), 1)
        return vectors.rescaled(g_s, ratio)

    return of_both_gradients("match_ascent_norm", combine)
