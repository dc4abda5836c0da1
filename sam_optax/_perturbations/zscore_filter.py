"""ZSharp's filter: the elements of the gradient that deviate most from the mean of their layer."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import OptState, Params, Updates

from sam_optax._internal import hyperparameters as hp
from sam_optax._internal import largest_elements, trees
from sam_optax._internal.devices import AxisName
from sam_optax._internal.types import Leaf
from sam_optax._perturbations.perturbation import Perturbation, stateless


def zscore_filter(quantile: float = 0.95) -> Perturbation:
    r"""ZSharp: keeps only the elements of the ascent gradient with the largest z-scores per layer.

    .. math::
        m_j = \left[\, |z_j| > Q_p(|z|) \,\right], \qquad
        z_j = \frac{g_j - \mathrm{mean}(g)}{\mathrm{std}(g)}, \qquad g \odot m,

    for each leaf. ZSharp is ``optax.chain(zscore_filter(quantile), sam(rho))``: ascent with the
    full radius along the few elements that stand out. Within a leaf the z-scores have the same
    order as the distances to the mean, so the deviation is not computed, and the quantile is found
    by counting, without a sort. As in the public code, biases and other leaves with fewer than two
    axes are not filtered, nor is a leaf that would become 0, such as one with equal elements. The
    public code then uses a separate radius ρ for each leaf; the paper and ``sam`` take one norm
    over all leaves.

    Args:
      quantile: p in [0, 1), the share of a leaf that is set to 0. Default 0.95, the paper's.

    Returns:
      A :class:`~sam_optax.Perturbation` that maps g to its largest deviations, in the dtypes of the
      gradient, for use in ``optax.chain``. It has no state.

    Raises:
      ValueError: ``quantile`` is out of range; in ``update``, ``norm_axis_name`` is set, which
        would split layers.

    Example:
      >>> import jax.numpy as jnp, optax, sam_optax
      >>> tx = sam_optax.zscore_filter(quantile=0.7)
      >>> g = jnp.array([[1.0, 1.0, 5.0, 1.0, 2.0]])  # of mean 2
      >>> print(tx.update(g, tx.init(g))[0])
      [[0. 0. 5. 0. 0.]]
      >>> zsharp = sam_optax.as_perturbation(optax.chain(tx, sam_optax.sam(rho=0.1)))

    References:
      Yun, `Sharpness-Aware Minimization with Z-Score Gradient Filtering for Neural Networks
      <https://arxiv.org/abs/2505.02369>`_, 2025.
    """
    hp.check_number("quantile", quantile, lower=0, upper=1)

    def filters(leaf: Leaf) -> bool:
        return trees.is_inexact(leaf) and jnp.ndim(leaf) > 1 and jnp.size(leaf) > 0

    def update_fn(
        updates: Updates,
        state: OptState,
        params: Params | None = None,
        *,
        norm_axis_name: AxisName | None = None,
        **extra: Any,
    ) -> tuple[Updates, OptState]:
        del params, extra
        if norm_axis_name is not None:
            raise ValueError(
                f"norm_axis_name={norm_axis_name!r} cannot be used with zscore_filter, which takes "
                "the mean of whole leaves. Shard the params under jit instead."
            )
        leaves, structure = jax.tree.flatten(updates)
        chosen = [i for i, leaf in enumerate(leaves) if filters(leaf)]
        wide = [trees.widen(leaves[i]) for i in chosen]
        ranks = [largest_elements.rank(x - jnp.mean(x)) for x in wide]
        # At least this many elements are as far from the mean as the quantile's lower neighbour.
        counts = [r.size - int(quantile * (r.size - 1)) for r in ranks]
        thresholds = largest_elements.kth_largest(ranks, counts)
        for i, r, threshold in zip(chosen, ranks, thresholds, strict=True):
            kept = r > threshold
            kept = kept | ~jnp.any(kept & (leaves[i] != 0))
            leaves[i] = jnp.where(kept, leaves[i], trees.zeros_like(leaves[i]))
        return jax.tree.unflatten(structure, leaves), state

    return Perturbation(stateless, update_fn, state_type=optax.EmptyState)
