"""ESAM's stochastic weight perturbation: an unbiased random part of ε."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from optax import Params, Updates

from sam_optax._internal import generator, noise, trees
from sam_optax._internal import hyperparameters as hp
from sam_optax._internal.devices import AxisName
from sam_optax._perturbations.perturbation import Perturbation


class RandomMaskState(NamedTuple):
    """State of :func:`sam_optax.random_mask`.

    Attributes:
      key: uint32 key data of the next draw (raw, so that every serializer takes it).
    """

    key: chex.Array


def random_mask(
    beta: hp.Hyperparameter = 0.6, *, key: noise.Key, whole_leaves: bool = False
) -> Perturbation:
    r"""ESAM: keeps each element of the perturbation ε with probability β, scaled by 1/β.

    .. math::
        \varepsilon' = \frac{1}{\beta}\, b \odot \varepsilon, \qquad b_i \sim
        \mathrm{Bernoulli}(\beta), \qquad \mathbb{E}\, \varepsilon' = \varepsilon.

    The scaling preserves the expectation of ε. Chain it after a perturbation:
    ``as_perturbation(optax.chain(sam(rho), random_mask(beta, key=key)))``. The expected squared
    norm is ρ²/β. Chained before one, it makes a random subset of the weights ascend with the full
    radius. The other half of ESAM is :func:`rising_samples`.

    Args:
      beta: β in (0, 1], the share of elements that is kept. Default 0.6; published settings are 0.5
        and 0.6. 1 keeps every element.
      key: a JAX PRNG key, typed or raw, or an integer seed.
      whole_leaves: whether to keep or drop each leaf as a whole, as in ESAM's public code. Default
        False: element-wise, as in the paper.

    Returns:
      A :class:`~sam_optax.Perturbation` with a :class:`RandomMaskState`, for use in
      ``optax.chain``. Under ``axis_name`` and with ``groups``, each device and each group draws a
      separate mask.

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
        del params
        return RandomMaskState(noise.first_key(key))

    def update_fn(
        updates: Updates,
        state: RandomMaskState,
        params: Params | None = None,
        *,
        beta: chex.Numeric,
        draw_index: chex.Numeric | None,
        norm_axis_name: AxisName | None,
        **extra: Any,
    ) -> tuple[Updates, RandomMaskState]:
        del params, extra
        share = jnp.asarray(beta).astype(jnp.float32)
        words = noise.fold_in(state.key, draw_index)
        bits = noise.of_shards(
            lambda index: noise.bits_tree(noise.fold_in(words, index), updates, whole_leaves),
            updates,
            None if whole_leaves else norm_axis_name,
        )

        def keep(e: jax.Array, b: jax.Array) -> jax.Array:
            scaled = e / share.astype(e.dtype)
            return jnp.where(generator.uniform(b) < share, scaled, jnp.zeros_like(scaled))

        return trees.map_wide(keep, updates, bits), RandomMaskState(noise.next_key(state.key))

    return Perturbation(
        init_fn, update_fn, hyperparameters={"beta": beta}, state_type=RandomMaskState
    )
