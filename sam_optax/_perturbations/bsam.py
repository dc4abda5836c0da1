"""bSAM: a perturbation with noise and length scaled by a learned precision."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from chex import Array, Numeric
from optax import Params, Updates

from sam_optax._internal import hyperparameters as hp
from sam_optax._internal import noise, trees
from sam_optax._internal.types import Leaf, PyTree
from sam_optax._perturbations.perturbation import Perturbation


class BsamState(NamedTuple):
    """State of :func:`sam_optax.bsam`.

    Attributes:
      key: uint32 words of the next draw.
      precision: s, real, float32 or wider, with the structure and shapes of the params; ``None`` in
        place of non-float leaves. The posterior of a weight is N(w, 1/(N s)).
    """

    key: Array
    precision: PyTree


def bsam(
    rho: hp.Hyperparameter = 0.01,
    *,
    data_size: float,
    weight_decay: float,
    key: noise.Key,
    decay: float = 0.999,
    damping: float = 0.1,
    initial_precision: float = 1.0,
) -> Perturbation:
    r"""bSAM: ascends from a sample of the posterior, scaled by the learned precision.

    .. math::
        g = \nabla L(w + \delta), \quad \delta \sim N(0, 1/(N s)), \qquad
        \varepsilon = \rho\, g/s, \qquad
        s \leftarrow \beta_2\, s + (1 - \beta_2)(\sqrt{s}\, |g| + \gamma + \lambda),

    element-wise. ε is not normalized, is added to w itself, and uses s from before its update. The
    public code, with one sample for each of 8 groups of a batch, is
    ``sharpness_aware(optax.scale(-learning_rate), bsam(...),
    descent=optax.chain(optax.add_decayed_weights(weight_decay), optax.ema(beta_1, debias=False),
    scale_by_precision()), groups=8)``, where :func:`scale_by_precision` divides by the s in this
    state. Predictions average over samples of N(w, 1/(N s)).

    Args:
      rho: ρ ≥ 0. Default 0.01, as in the public code for CIFAR.
      data_size: N > 0, the number of training examples (public code: times 4, for augmentation).
      weight_decay: λ ≥ 0, as in the descent: the prior precision (public code: 40) divided by N.
      key: a JAX PRNG key, typed or raw, or an integer seed.
      decay: β₂, 0 ≤ β₂ < 1. Default 0.999, as in the public code.
      damping: γ ≥ 0. Default 0.1, as in the public code.
      initial_precision: s before the first step, > 0. Default 1, as in the public code.

    Returns:
      A :class:`~sam_optax.Perturbation` with a ``start_fn``, which ``optax.chain`` around it would
      lose (an error). Its state is one key and one copy of the params.

    Raises:
      TypeError: ``key`` is neither a seed nor a single PRNG key.
      ValueError: a hyperparameter out of range.

    Example:
      >>> import jax.numpy as jnp, sam_optax
      >>> method = sam_optax.bsam(rho=0.1, data_size=1e12, weight_decay=0.0, key=0)
      >>> w, g = jnp.array([1.0, 1.0]), jnp.array([1.0, -2.0])
      >>> eps, state = method.update(g, method.init(w), w)
      >>> print(eps)
      [ 0.1 -0.2]

    References:
      Möllenhoff and Khan, `SAM as an Optimal Relaxation of Bayes
      <https://arxiv.org/abs/2210.01620>`_, 2022.
    """
    hp.check("rho", rho, lower=0)
    hp.check_number("data_size", data_size, lower=0, lower_allowed=False)
    hp.check_number("weight_decay", weight_decay, lower=0)
    hp.check_number("decay", decay, lower=0, upper=1)
    hp.check_number("damping", damping, lower=0)
    hp.check_number("initial_precision", initial_precision, lower=0, lower_allowed=False)
    noise.check_key(key)

    def init_fn(params: Params) -> BsamState:
        def initial(p: Leaf) -> jax.Array:
            real = jnp.finfo(trees.compute_dtype(p)).dtype
            return jnp.full_like(p, initial_precision, dtype=real)

        precision = trees.inexact_only(trees.map_inexact(initial, params))
        return BsamState(noise.first_key(key), precision)

    def start_fn(
        params: Params, state: BsamState, draw_index: Numeric | None, **extra: Any
    ) -> Params:
        def sample(s: jax.Array, z: jax.Array) -> jax.Array:
            wide = z.astype(trees.promote(z.dtype, s.dtype))
            return wide / jnp.sqrt(data_size * s).astype(wide.dtype)

        normal = noise.normal_tree(noise.fold_in(state.key, draw_index), params, 1.0)
        return trees.add(params, jax.tree.map(sample, state.precision, normal))

    def update_fn(
        updates: Updates, state: BsamState, params: Params | None, rho: Numeric, **extra: Any
    ) -> tuple[Updates, BsamState]:
        def ascend(g: jax.Array, s: jax.Array) -> jax.Array:
            return g * (jnp.asarray(rho).astype(s.dtype) / s).astype(g.dtype)

        def learn(g: Leaf, s: Leaf) -> Leaf:
            if s is None or not trees.is_inexact(g):
                return s
            seen = jnp.sqrt(s) * jnp.abs(g).astype(s.dtype) + damping + weight_decay
            return decay * s + (1 - decay) * seen

        eps = trees.map_wide(ascend, updates, state.precision)
        precision = jax.tree.map(learn, updates, state.precision, is_leaf=trees.is_none)
        return eps, BsamState(noise.next_key(state.key), precision)

    return Perturbation(
        init_fn, update_fn, start_fn, hyperparameters={"rho": rho}, state_type=BsamState
    )
