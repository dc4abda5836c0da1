"""The steepest ascent step within a (normalized) p-norm ball, shared by SAM and ASAM."""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from chex import Numeric
from optax import Params, Updates

from sam_optax._internal import hyperparameters as hp
from sam_optax._internal import trees, vectors
from sam_optax._internal.devices import Axes
from sam_optax._internal.types import Leaf


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
    rho: Numeric,
    p: float,
    axis_name: Axes = None,
) -> Updates:
    """The argmax of ⟨g, ε⟩ over ‖T⁻¹ε‖_p ≤ ρ, with T the diagonal ``scaling()`` (None: identity).

    The solution is ε = T ε̃, where ε̃ solves the same problem for T g in the plain ball. Norms span
    the devices of ``axis_name`` if the tree is sharded over them.
    """

    def diagonal() -> tuple[Params, ...]:
        return () if scaling is None else (scaling(),)

    def scaled() -> Updates:
        return trees.map_inexact(
            lambda g, *t: vectors.times(trees.widen(g), *t), grads, *diagonal()
        )

    def displacement(g: Leaf, x: jax.Array, *t: jax.Array) -> jax.Array:
        return trees.cast_like(vectors.times(direction(x), *t), g)

    if p == 2:
        norm = vectors.l2_norm(
            lambda: trees.inexact_leaves(scaled()),
            full_range=vectors.squares_overflow(grads),
            axis_name=axis_name,
        )
        direction = _direction_2(norm, rho)
    else:
        direction = _direction_p(trees.inexact_leaves(scaled()), rho, p, axis_name)
    return trees.map_inexact(displacement, grads, scaled(), *diagonal())


def _direction_2(norm: vectors.Norm, rho: Numeric) -> Callable[[jax.Array], jax.Array]:
    """ρ x/‖x‖₂; ‖x‖ = 0 only where every x is 0, so dividing by 1 instead gives 0."""
    inverse = jnp.asarray(rho).astype(norm.value.dtype) / vectors.or_1(norm.value)
    return lambda x: vectors.times(x, norm.scale, inverse)


def _direction_p(
    leaves: Sequence[jax.Array], rho: Numeric, p: float, axis_name: Axes
) -> Callable[[jax.Array], jax.Array]:
    """ρ sign(x) (|x|/‖x‖_q)^(q−1), with its limits at p = ∞ (q = 1) and p = 1 (q = ∞)."""
    if math.isinf(p):
        return lambda x: vectors.times(jnp.sign(x), rho)
    largest = vectors.or_1(vectors.max_norm(leaves, axis_name))
    # Compilers divide by a scalar as a product with its reciprocal, which must not underflow.
    safe = jnp.where(largest > 1, 2.0**-64, 2.0**64).astype(largest.dtype)

    def relative(x: jax.Array) -> jax.Array:
        magnitude = jnp.abs(x)
        return vectors.times(magnitude, safe) / (largest * safe).astype(magnitude.dtype)

    if p == 1:
        # Elements within a few rounding units of the largest count as ties: two kernels that
        # compute the same x may round it differently, and the largest must not be missed.
        tie = 1 - 4 * jnp.finfo(largest.dtype).eps
        ties = [jnp.where(relative(x) >= tie, 1, 0) for x in leaves]
        count = vectors.total(ties, largest.dtype, axis_name)
        share = jnp.asarray(rho).astype(largest.dtype) / jnp.maximum(count, 1)
        return lambda x: vectors.times(jnp.where(relative(x) >= tie, jnp.sign(x), 0), share)
    q = p / (p - 1)
    powers = vectors.total([relative(x) ** q for x in leaves], largest.dtype, axis_name)
    # (|x|/‖x‖)^(q−1) as |x|^(q−1) and one power of the sum: a power of the quotient would magnify
    # the rounding of the norm by q − 1, which is large for p near 1.
    inverse = vectors.or_1(powers) ** (-1 / p)
    return lambda x: vectors.times(jnp.sign(x), relative(x) ** (q - 1), inverse, rho)
