"""ESAM's stochastic weight perturbation: an unbiased random part of ε."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from chex import Array, Numeric
from optax import Params, Updates

from sam_optax._internal import generator, noise, trees
from sam_optax._internal import hyperparameters as hp
from sam_optax._internal.types import PyTree
from sam_optax._perturbations.perturbation import Perturbation


class RandomMaskState(NamedTuple):
    """State of :func:`sam_optax.random_mask`.

    Attributes:
      key: uint32 key data of the next draw (raw, so that every serializer takes it).
    """

    key: Array


def random_mask(
    beta: hp.Hyperparameter = 0.6, *, key: noise.Key, whole_leaves: bool = False
) -> Perturbation:
    r"""ESAM: keeps each element of the perturbation ε with probability β, scaled by 1/β.

    .. math::
        \varepsilon' = \frac{1}{\beta}\, b \odot \varepsilon, \quad
        b_i \sim \mathrm{Bernoulli}(\beta), \quad \mathbb{E}\, \varepsilon' = \varepsilon.

    Chain it after a perturbation, ``optax.chain(sam(rho), random_mask(beta, key=key))``, where the
    expected squared norm is ρ²/β. Chained before one, it makes a random subset of the weights
    ascend with the full radius. The other half of ESAM is :func:`rising_samples`.

    Args:
      beta: β in (0, 1], the share of elements that is kept. Default 0.6; published: 0.5 and 0.6.
      key: a JAX PRNG key, typed or raw, or an integer seed.
      whole_leaves: drop whole leaves, as in the public code. Default ``False``, the paper's.

    Returns:
      A :class:`~sam_optax.Perturbation` whose state is one key, for use in ``optax.chain``. Under
      ``axis_name`` and with ``groups``, each device and each group draws a separate mask.

    Raises:
      TypeError: ``key`` is neither a seed nor a single PRNG key.
      ValueError: ``beta`` outside (0, 1].

    Example:
      >>> import jax, jax.numpy as jnp, sam_optax
      >>> mask = sam_optax.random_mask(beta=0.5, key=jax.random.key(0))
      >>> eps = jnp.ones(1000)
      >>> kept, _ = mask.update(eps, mask.init(eps))
      >>> sorted(set(kept.tolist()))
      [0.0, 2.0]

    References:
      Du et al., `Efficient Sharpness-Aware Minimization for Improved Training of Neural Networks
      <https://arxiv.org/abs/2110.03141>`_, 2022.
    """
    hp.check("beta", beta, lower=0, upper=1, lower_allowed=False, upper_allowed=True)
    noise.check_key(key)

    def init_fn(params: Params) -> RandomMaskState:
        return RandomMaskState(noise.first_key(key))

    def update_fn(
        updates: Updates, state: RandomMaskState, params: Params | None, beta: Numeric, **extra: Any
    ) -> tuple[Updates, RandomMaskState]:
        share = jnp.asarray(beta).astype(jnp.float32)
        words = noise.fold_in(state.key, extra["draw_index"])

        def draw(shard: Numeric | None) -> PyTree:
            return noise.bits_tree(noise.fold_in(words, shard), updates, whole_leaves)

        axis_name = None if whole_leaves else extra["norm_axis_name"]
        bits = noise.of_shards(draw, updates, axis_name)

        def keep(e: Array, b: Array) -> Array:
            scaled = e / share.astype(e.dtype)
            return jnp.where(generator.uniform(b) < share, scaled, jnp.zeros_like(scaled))

        return trees.map_wide(keep, updates, bits), RandomMaskState(noise.next_key(state.key))

    return Perturbation(
        init_fn, update_fn, hyperparameters={"beta": beta}, state_type=RandomMaskState
    )
