"""How the noise of a random start and the gradient there are combined into one direction."""

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from chex import Numeric
from optax import Updates

from sam_optax._internal import hyperparameters as hp
from sam_optax._internal import trees, vectors
from sam_optax._internal.devices import Axes

Weighting: TypeAlias = Literal["normalized", "normalized_gradient", "raw"]
"""The terms that λ weights, with ‖δ‖ the expected length of δ₀, (E‖δ₀‖²)^½.

``"normalized"``: δ₀/‖δ‖ + λ ĝ/‖ĝ‖; ``"normalized_gradient"``: δ₀ + λ ĝ/‖ĝ‖; ``"raw"``: δ₀ + λ ĝ.
"""

check_weighting = hp.name_check("weighting", Weighting)


class Factors(NamedTuple):
    """The scalar factors of δ₀ and of ĝ in a direction."""

    noise: tuple[Numeric, ...]
    gradient: tuple[Numeric, ...]


def of_terms(
    weighting: Weighting,
    grads: Updates,
    lmbda: Numeric,
    noise_length: Callable[[], jax.Array],
    axis_name: Axes,
) -> Factors:
    """The factors for ``grads``, ĝ; ``noise_length()`` is (E‖δ₀‖²)^½ where there is a gradient."""
    if weighting == "raw":
        return Factors((), (lmbda,))
    norm = vectors.l2_norm(
        lambda: trees.wide_leaves(grads),
        full_range=vectors.squares_overflow(grads),
        axis_name=axis_name,
    )
    length = vectors.or_1(norm.value)
    if weighting == "normalized_gradient":
        return Factors((), (norm.scale, jnp.asarray(lmbda).astype(length.dtype) / length))
    # Both terms are multiplied by ‖ĝ‖/λ, so that without noise the gradient is unchanged. This is
    # impossible for λ = 0; then the factor of the gradient is 0.
    weight = jnp.asarray(lmbda).astype(length.dtype)
    share: Numeric = 1.0
    if not (isinstance(lmbda, int | float) and lmbda > 0):  # not statically positive
        share = jnp.where(weight > 0, 1, 0).astype(length.dtype)
    noise = length / (vectors.or_1(noise_length()) * vectors.or_1(weight))
    return Factors((noise,), (norm.scale, share))
