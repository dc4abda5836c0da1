"""GSAM: descent that also reduces the surrogate gap."""

import jax
import jax.numpy as jnp
import optax
from chex import Numeric
from optax import Updates

from sam_optax._descent.descent import of_both_gradients, where_perturbed
from sam_optax._internal import hyperparameters as hp
from sam_optax._internal import trees, vectors
from sam_optax._internal.devices import AxisName
from sam_optax._internal.types import Leaf


def surrogate_gap(alpha: hp.Hyperparameter = 0.4) -> optax.GradientTransformationExtraArgs:
    r"""GSAM: changes the sharp gradient so that the surrogate gap L(w + ε) − L(w) shrinks too.

    .. math::
        g_s - \alpha\, g_\perp, \qquad
        g_\perp = g - \frac{\langle g, g_s \rangle}{\|g_s\|^2}\, g_s,

    with g the ascent gradient and g_s the sharp one, each as one vector over the whole tree. The
    update descends on the perturbed loss and, in the orthogonal direction, ascends on the loss
    itself, which reduces their difference, the surrogate gap. Steps that do not perturb have
    g_⊥ = 0.

    GSAM is ``sharpness_aware(base, sam(rho), descent=surrogate_gap(alpha))``, with ``rho`` from
    :func:`rho_from_learning_rate` in the paper; with :func:`rsam` in place of ``sam`` it is R-GSAM,
    whose g is the gradient at the random start. Under ``axis_name`` both gradients are means over
    the devices; the public code decomposes the gradients of each device.

    Args:
      alpha: α ≥ 0. Default 0.4, as in the public code. 0 is SAM.

    Returns:
      An ``optax.GradientTransformationExtraArgs``, without state unless ``alpha`` is a schedule.

    Raises:
      ValueError: ``alpha`` < 0; in ``update``, ``ascent_grads`` is missing.

    Example:
      >>> import jax.numpy as jnp, sam_optax
      >>> tx = sam_optax.surrogate_gap(alpha=0.4)
      >>> g, g_sharp = jnp.array([2.0, 0.0]), jnp.array([1.0, 1.0])
      >>> updates, _ = tx.update(g_sharp, tx.init(g_sharp), ascent_grads=g)
      >>> print(f"{updates[0]:.1f} {updates[1]:.1f}")
      0.6 1.4

    References:
      Zhuang et al., `Surrogate Gap Minimization Improves Sharpness-Aware Training
      <https://arxiv.org/abs/2203.08065>`_, 2022.
    """
    hp.check("alpha", alpha, lower=0)

    def combine(
        g_s: Updates, g: Updates, perturbed: Numeric, axis: AxisName | None, alpha: Numeric
    ) -> Updates:
        a = where_perturbed(perturbed, alpha, 0)
        # g_s − α (g − c g_s) = (1 + α c) g_s − α g.
        c = vectors.coefficient(g, g_s, axis)
        own = 1 + a.astype(c.dtype) * c

        def gap(x_s: jax.Array, x: Leaf) -> jax.Array:
            other = jnp.zeros_like(x_s) if x is None else jnp.asarray(x).astype(x_s.dtype)
            return own.astype(x_s.dtype) * x_s - a.astype(x_s.dtype) * other

        return trees.map_wide(gap, g_s, g)

    return of_both_gradients("surrogate_gap", combine, alpha=alpha)
