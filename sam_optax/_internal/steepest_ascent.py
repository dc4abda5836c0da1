"""The steepest ascent step within a (normalized) p-norm ball, shared by SAM and ASAM."""

import math
from collections.abc import Callable, Sequence

import chex
import jax
import jax.numpy as jnp
from optax import Params, Updates

from sam_optax._internal import hyperparameters as hp
from sam_optax._internal import trees, vectors
from sam_optax._internal.devices import AxisName


def check_p(p: float) -> None:
    """Raises unless ``p`` is a static norm order, 1 ≤ p ≤ ∞."""
    if callable(p) or isinstance(p, jax.core.Tracer):
        raise TypeError(
            "p must be a static number in [1, inf] (name it in static_args inside "
            f"optax.inject_hyperparams), got {p!r}."
        )
    hp.check("p", p, lower=1, upper_allowed=True)


def steepest_ascent(
    grads: Updates,
    scaling: Callable[[], Params] | None,
    rho: chex.Numeric,
    p: float,
    axis_name: AxisName | None = None,
) -> Updates:
    """The argmax of ⟨g, ε⟩ over ‖T⁻¹ε‖_p ≤ ρ, with T the diagonal ``scaling()`` (None: identity).

    The solution is ε = T ε̃, where ε̃ solves the same problem for T g in the plain ball. Norms span
    the devices of ``axis_name`` if the tree is sharded over them.
    """

    def scaled() -> Updates:
        return trees.map_inexact(
            lambda g, *t: vectors.times(trees.widen(g), *t), grads, *diagonal()
        )

    def diagonal() -> tuple[Params, ...]:
        return () if scaling is None else (scaling(),)

    if p == 2:
        direction = _direction_2(
            lambda: trees.inexact_leaves(scaled()), rho, vectors.squares_overflow(grads), axis_name
        )
    else:
        direction = _direction_p(trees.inexact_leaves(scaled()), rho, p, axis_name)
    return trees.map_inexact(
        lambda g, x, *t: trees.cast_like(vectors.times(direction(x), *t), g),
        grads,
        scaled(),
        *diagonal(),
    )


def _direction_2(
    leaves: Callable[[], Sequence[jax.Array]],
    rho: chex.Numeric,
    full_range: bool,
    axis_name: AxisName | None,
) -> Callable[[jax.Array], jax.Array]:
    """ρ x/‖x‖₂; ‖x‖ = 0 only where every x is 0, so dividing by 1 instead gives 0."""
    norm = vectors.l2_norm(leaves, full_range=full_range, axis_name=axis_name)
    inverse = jnp.asarray(rho).astype(norm.value.dtype) / jnp.where(norm.value > 0, norm.value, 1)
    return lambda x: vectors.times(x, norm.scale, inverse)


def _direction_p(
    leaves: Sequence[jax.Array], rho: chex.Numeric, p: float, axis_name: AxisName | None
) -> Callable[[jax.Array], jax.Array]:
    """ρ sign(x) (|x|/‖x‖_q)^(q−1), with its limits at p = ∞ (q = 1) and p = 1 (q = ∞)."""
    if math.isinf(p):
        return lambda x: vectors.times(jnp.sign(x), rho)
    largest = vectors.max_norm(leaves, axis_name)
    largest = jnp.where(largest > 0, largest, 1)

    # Compilers implement division by a scalar as a product with its reciprocal, which must not
    # underflow.
    safe = jnp.where(largest > 1, 2.0**-64, 2.0**64).astype(largest.dtype)

    def relative(x: jax.Array) -> jax.Array:
        magnitude = jnp.abs(x)
        return vectors.times(magnitude, safe) / (largest * safe).astype(magnitude.dtype)

    if p == 1:
        # Elements within a few rounding units of the largest count as ties: two kernels that
        # compute the same x may round it differently, and the largest must not be missed.
        tie = 1 - 4 * jnp.finfo(largest.dtype).eps

        def is_largest(x: jax.Array) -> jax.Array:
            return relative(x) >= tie

        count = vectors.total(
            [jnp.where(is_largest(x), 1, 0) for x in leaves], largest.dtype, axis_name
        )
        share = jnp.asarray(rho).astype(largest.dtype) / jnp.maximum(count, 1)
        return lambda x: vectors.times(jnp.where(is_largest(x), jnp.sign(x), 0), share)
    q = p / (p - 1)
    powers = vectors.total([relative(x) ** q for x in leaves], largest.dtype, axis_name)
    # (|x|/‖x‖)^(q−1) as |x|^(q−1) and one power of the sum: a power of the quotient would magnify
    # the rounding of the norm by q − 1, which is large for p near 1.
    inverse = jnp.where(powers > 0, powers, 1) ** (-1 / p)

    def direction(x: jax.Array) -> jax.Array:
        return vectors.times(jnp.sign(x), relative(x) ** (q - 1), inverse, rho)

    return direction
