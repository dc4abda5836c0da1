"""How a random start's noise and the gradient found there add up to one direction."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import chex
import jax
import jax.numpy as jnp
import optax

from sam_optax._internal import trees, vectors
from sam_optax._internal.devices import AxisName

Weighting: TypeAlias = Literal["normalized", "normalized_gradient", "raw"]
"""What λ weighs, with ‖δ‖ the expected length of δ₀, (E‖δ₀‖²)^½.

``"normalized"``: δ₀/‖δ‖ + λ ĝ/‖ĝ‖; ``"normalized_gradient"``: δ₀ + λ ĝ/‖ĝ‖; ``"raw"``: δ₀ + λ ĝ.
"""


def check_weighting(weighting: Any) -> None:
    """Raises unless ``weighting`` is one of the names."""
    if weighting not in get_args(Weighting):
        known = ", ".join(repr(name) for name in get_args(Weighting))
        raise ValueError(f"weighting must be one of {known}, got {weighting!r}.")


class Factors(NamedTuple):
    """What the two terms of a direction are multiplied by.

    Attributes:
      noise: scalars for δ₀.
      gradient: scalars for ĝ.
    """

    noise: tuple[chex.Numeric, ...]
    gradient: tuple[chex.Numeric, ...]


def of_terms(
    weighting: Weighting,
    grads: optax.Updates,
    lmbda: chex.Numeric,
    noise_length: Callable[[], jax.Array],
    axis_name: AxisName | None,
) -> Factors:
    """The factors of δ₀ and ĝ in their sum.

    Args:
      weighting: what λ weighs.
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
    # Both terms times ‖ĝ‖/λ, so that without noise the gradient stays as it is. λ = 0 has no such
    # form: then the gradient's factor is 0.
    weight = jnp.asarray(lmbda).astype(length.dtype)
    share = 1.0 if _is_positive(lmbda) else jnp.where(weight > 0, 1, 0).astype(length.dtype)
    return Factors((length / (_or_1(noise_length()) * _or_1(weight)),), (norm.scale, share))


def _is_positive(value: chex.Numeric) -> bool:
    """Whether it is known to be, before anything is computed."""
    return isinstance(value, int | float) and value > 0


def _or_1(length: jax.Array) -> jax.Array:
    """What to divide by; where it is 0, so is what is divided, or the quotient is not used."""
    return jnp.where(length > 0, length, 1)
