"""How the noise of a random start and the gradient there are combined into one direction."""

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias, get_args

import chex
import jax
import jax.numpy as jnp
from optax import Updates

from sam_optax._internal import trees, vectors
from sam_optax._internal.devices import AxisName

Weighting: TypeAlias = Literal["normalized", "normalized_gradient", "raw"]
"""The terms that λ weights, with ‖δ‖ the expected length of δ₀, (E‖δ₀‖²)^½.

``"normalized"``: δ₀/‖δ‖ + λ ĝ/‖ĝ‖; ``"normalized_gradient"``: δ₀ + λ ĝ/‖ĝ‖; ``"raw"``: δ₀ + λ ĝ.
"""


def check_weighting(weighting: object) -> None:
    """Raises unless ``weighting`` is one of the names."""
    if weighting not in get_args(Weighting):
        known = ", ".join(repr(name) for name in get_args(Weighting))
        raise ValueError(f"weighting must be one of {known}, got {weighting!r}.")


class Factors(NamedTuple):
    """The factors of the two terms of a direction.

    Attributes:
      noise: scalars for δ₀.
      gradient: scalars for ĝ.
    """

    noise: tuple[chex.Numeric, ...]
    gradient: tuple[chex.Numeric, ...]


def of_terms(
    weighting: Weighting,
    grads: Updates,
    lmbda: chex.Numeric,
    noise_length: Callable[[], jax.Array],
    axis_name: AxisName | None,
) -> Factors:
    """The factors of δ₀ and ĝ in their sum.

    Args:
      weighting: the terms that λ weights.
      grads: ĝ.
      lmbda: λ.
      noise_length: returns (E‖δ₀‖²)^½ over the leaves that have a gradient.
      axis_name: axis of devices that norms span.
    """
    if weighting == "raw":
        return Factors((), (lmbda,))
    norm = vectors.l2_norm(
        lambda: [trees.widen(g) for g in trees.inexact_leaves(grads)],
        full_range=vectors.squares_overflow(grads),
        axis_name=axis_name,
    )
    length = _or_1(norm.value)
    if weighting == "normalized_gradient":
        return Factors((), (norm.scale, jnp.asarray(lmbda).astype(length.dtype) / length))
    # Both terms are multiplied by ‖ĝ‖/λ, so that without noise the gradient is unchanged. This is
    # impossible for λ = 0; then the factor of the gradient is 0.
    weight = jnp.asarray(lmbda).astype(length.dtype)
    share = 1.0 if _is_positive(lmbda) else jnp.where(weight > 0, 1, 0).astype(length.dtype)
    return Factors((length / (_or_1(noise_length()) * _or_1(weight)),), (norm.scale, share))


def _is_positive(value: chex.Numeric) -> bool:
    """Whether the value is statically known to be positive."""
    return isinstance(value, int | float) and value > 0


def _or_1(length: jax.Array) -> jax.Array:
    """A safe divisor: where it is 0, the dividend is 0 too or the quotient is not used."""
    return jnp.where(length > 0, length, 1)
