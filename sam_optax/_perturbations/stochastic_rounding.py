"""Stochastic rounding of the perturbed point, for params in low precision."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from chex import Array, Numeric, PRNGKey
from jax import lax
from jax.typing import DTypeLike
from optax import GradientTransformation, OptState, Params, Updates

from sam_optax._internal import noise, trees
from sam_optax._internal.types import Leaf, PyTree
from sam_optax._perturbations.perturbation import Perturbation, as_perturbation, require_params


class StochasticRoundingState(NamedTuple):
    """State of :func:`sam_optax.stochastic_rounding`.

    Attributes:
      key: uint32 key data of the next draw (raw, so that every serializer takes it).
      inner_state: state of the perturbation.
    """

    key: Array
    inner_state: OptState


def stochastic_rounding(perturbation: GradientTransformation, *, key: noise.Key) -> Perturbation:
    r"""Rounds the perturbed params up or down at random, so that ε is preserved on average.

    .. math::
        \varepsilon' = \mathrm{SR}(w + \varepsilon) - w, \; \mathbb{E} \varepsilon' = \varepsilon,

    where SR rounds to the dtype of each leaf of the params. Rounding to nearest loses every element
    of ε that is smaller than half the distance s between neighbouring numbers at w. Stochastic
    rounding keeps it on average, with noise of variance ``|ε|(s − |ε|)`` per element.

    It is for params stored *and* used in low precision: float32 and wider are not rounded. If the
    model can compute in float32, ``sharpness_aware(..., perturb_dtype=jnp.float32)`` keeps ε
    exactly; if it casts float32 params, the cast already rounds some elements up and some down.

    Args:
      perturbation: any perturbation, including random starts.
      key: a JAX PRNG key, typed or raw, or an integer seed.

    Returns:
      A :class:`~sam_optax.Perturbation`. Its state is one key and the state of ``perturbation``.

    Raises:
      ValueError: ``params`` is missing in ``update``, or ``perturbation`` takes its only gradient
        at its start, which is not rounded.

    Example:
      >>> import jax, jax.numpy as jnp, sam_optax
      >>> params, grads = jnp.ones(10_000, jnp.bfloat16), jnp.ones(10_000, jnp.bfloat16)
      >>> for method in (sam_optax.sam(0.05),
      ...                sam_optax.stochastic_rounding(sam_optax.sam(0.05), key=jax.random.key(0))):
      ...     perturbed, _ = method.perturb_fn(params, grads, method.init(params))
      ...     print(f"{jnp.mean(perturbed.astype(jnp.float32) - 1):.4f}")  # ε = 0.0005
      0.0000
      0.0005
    """
    noise.check_key(key)
    inner = as_perturbation(perturbation)
    if inner.single_pass:
        raise ValueError(
            "perturbation takes its only gradient at its start (momentum_start, low_pass), which "
            "stochastic_rounding does not round: use perturb_dtype=jnp.float32 without it."
        )

    def init_fn(params: Params) -> StochasticRoundingState:
        return StochasticRoundingState(noise.first_key(key), inner.init(params))

    def update_fn(
        updates: Updates, state: StochasticRoundingState, params: Params, **extra: Any
    ) -> tuple[Updates, StochasticRoundingState]:
        require_params("stochastic_rounding", params)
        eps, inner_state = inner.update(updates, state.inner_state, params, **extra)
        next_key, now = jax.random.split(jax.random.wrap_key_data(state.key, impl="threefry2x32"))

        def keys_of(shard: Numeric | None) -> PyTree:
            key = now if shard is None else jax.random.fold_in(now, shard)
            leaves, structure = jax.tree.flatten(params, is_leaf=trees.is_none)
            keys = list(jax.random.split(key, max(len(leaves), 1)))
            return jax.tree.unflatten(structure, keys[: len(leaves)])

        def round_leaf(e: Leaf, w: Leaf, leaf_key: PRNGKey) -> Leaf:
            w = jnp.asarray(w)
            if jnp.iscomplexobj(w) or not trees.is_inexact(w) or jnp.finfo(w.dtype).bits >= 32:
                return e
            wide = trees.widen(w)
            target = wide + jnp.asarray(e).astype(wide.dtype)
            return trees.cast_like(_round_at_random(target, w.dtype, leaf_key) - wide, e)

        keys = noise.of_shards(keys_of, params, extra["norm_axis_name"])
        rounded = trees.map_inexact(round_leaf, eps, params, keys)
        return rounded, StochasticRoundingState(jax.random.key_data(next_key), inner_state)

    def start_fn(params: Params, state: StochasticRoundingState, **extra: Any) -> Params:
        return inner.start_fn(params, state.inner_state, **extra)

    return Perturbation.around(inner, init_fn, update_fn, start_fn)


def _round_at_random(x: jax.Array, dtype: DTypeLike, key: PRNGKey) -> jax.Array:
    """``x`` (float32) rounded at random to one of its neighbours in ``dtype``, unbiased."""
    info = jnp.finfo(dtype)
    bits = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0x7F800000)
    # The grid between two powers of two has 2^nmant steps; all of this arithmetic is exact.
    power = jnp.maximum(lax.bitcast_convert_type(bits, jnp.float32), float(info.smallest_normal))
    steps = x / power * 2.0**info.nmant
    below = jnp.floor(steps)
    up = jax.random.uniform(key, x.shape) < steps - below
    return (below + up.astype(x.dtype)) * 2.0**-info.nmant * power


def round_to(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The nearest number of ``dtype``, in the dtype of ``x``; unlike casts, compilers keep it."""
    info = jnp.finfo(dtype)
    rounded = lax.reduce_precision(x, info.nexp, info.nmant)
    if info.nexp >= 8:
        return rounded
    # Below the normal range the operation returns 0, but float16 has subnormal numbers there.
    step = float(info.smallest_subnormal)
    return jnp.where(jnp.abs(x) < float(info.smallest_normal), jnp.round(x / step) * step, rounded)
