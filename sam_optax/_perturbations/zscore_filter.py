"""ZSharp's filter: the elements of the gradient that deviate most from the mean of their layer."""

from typing import Any

import jax
import jax.numpy as jnp
from optax import EmptyState, Params, Updates

from sam_optax._internal import hyperparameters as hp
from sam_optax._internal import largest_elements, noise, trees
from sam_optax._perturbations.perturbation import Perturbation, refuse_shards


def zscore_filter(quantile: float = 0.95) -> Perturbation:
    r"""ZSharp: keeps only the elements of the ascent gradient with the largest z-scores per layer.

    .. math::
        g \odot m, \quad m_j = \left[\, |z_j| > Q_p(|z|) \,\right], \quad
        z_j = \frac{g_j - \mathrm{mean}(g)}{\mathrm{std}(g)},

    for each leaf. ZSharp is ``optax.chain(zscore_filter(quantile), sam(rho))``: ascent with the
    full radius along the few elements that stand out. The norm spans all leaves, as in the paper;
    in the public code each leaf has its own radius ρ. As there, leaves with fewer than two axes,
    such as biases, are not filtered, nor is one that would become 0, as with equal elements.

    Args:
      quantile: p in [0, 1), the share of a leaf that is set to 0. Default 0.95, the paper's.

    Returns:
      A :class:`~sam_optax.Perturbation` that maps g to its largest deviations, in the dtypes of the
      gradient, for use in ``optax.chain``. It has no state.

    Raises:
      ValueError: ``quantile`` is out of range; in ``update``, ``norm_axis_name`` splits layers.

    Example:
      >>> import jax.numpy as jnp, sam_optax
      >>> tx = sam_optax.zscore_filter(quantile=0.7)
      >>> g = jnp.array([[1.0, 1.0, 5.0, 1.0, 2.0]])  # of mean 2
      >>> print(tx.update(g, tx.init(g))[0])
      [[0. 0. 5. 0. 0.]]

    References:
      Yun, `Sharpness-Aware Minimization with Z-Score Gradient Filtering for Neural Networks
      <https://arxiv.org/abs/2505.02369>`_, 2025.
    """
    hp.check_number("quantile", quantile, lower=0, upper=1)

    def update_fn(
        updates: Updates, state: EmptyState, params: Params | None, **extra: Any
    ) -> tuple[Updates, EmptyState]:
        user = "zscore_filter, which takes the mean of whole leaves"
        refuse_shards(extra["norm_axis_name"], user)
        leaves, structure = jax.tree.flatten(updates)
        filtered = [trees.is_inexact(x) and jnp.ndim(x) > 1 and jnp.size(x) > 0 for x in leaves]
        chosen = [i for i, is_filtered in enumerate(filtered) if is_filtered]
        wide = [trees.widen(leaves[i]) for i in chosen]
        # Held, since a threshold is one of them: recomputed, it may be rounded in another way.
        ranks = [noise.hold(largest_elements.rank(x - jnp.mean(x))) for x in wide]
        # z-scores are ordered as distances to the mean: the deviation is not needed, nor a sort.
        # At least this many elements are as far from the mean as the quantile's lower neighbour.
        counts = [r.size - int(quantile * (r.size - 1)) for r in ranks]
        thresholds = largest_elements.kth_largest(ranks, counts)
        for i, r, threshold in zip(chosen, ranks, thresholds, strict=True):
            kept = r > threshold
            kept = kept | ~jnp.any(kept & (leaves[i] != 0))
            leaves[i] = jnp.where(kept, leaves[i], trees.zeros_like(leaves[i]))
        return jax.tree.unflatten(structure, leaves), state

    return Perturbation(hp.stateless, update_fn, state_type=EmptyState)
