"""Noise for weights, with a scale that follows the norm of each kernel."""

from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from chex import Array, Numeric
from optax import Params, Updates

from sam_optax._internal import hyperparameters as hp
from sam_optax._internal import noise, trees, vectors
from sam_optax._internal.devices import Axes
from sam_optax._internal.leaf_roles import AxisOverride, StackAxes, Units, unit_axes, unit_squares
from sam_optax._internal.types import Leaf, PyTree

NoiseScale: TypeAlias = Literal["relative", "sqrt_norm", "norm", "isotropic"]
"""The standard deviation of an element of kernel j, of n_j elements, in units of gamma.

``"relative"``: ‖w_j‖/√n_j; ``"sqrt_norm"``: ‖w_j‖^½; ``"norm"``: ‖w_j‖; ``"isotropic"``: 1.
"""

check_noise_scale = hp.name_check("noise_scale", NoiseScale)


def expected_squares(
    params: Params, noise_scale: NoiseScale, kernel_axis: AxisOverride, stack_axes: StackAxes
) -> jax.Array:
    """E‖δ_j‖²/γ² of each kernel's noise δ_j, broadcastable to the leaf."""

    def of_leaf(w: Leaf, units: Units) -> jax.Array:
        w = trees.widen(w)
        if noise_scale == "isotropic":
            return jnp.full((1,) * w.ndim, w.size, vectors.accumulator_dtype([w]))
        squares = unit_squares(w, units)
        if noise_scale == "relative":
            return squares
        size = _kernel_size(w, squares)
        return size * (vectors.root(squares) if noise_scale == "sqrt_norm" else squares)

    units = unit_axes(params, kernel_axis, min_ndim=2, stack_axes=stack_axes)
    return trees.map_inexact(of_leaf, params, units)


def kernel_noise(
    params: Params, expected_squares: PyTree, words: Array, gamma: Numeric, draw: noise.Draw | None
) -> PyTree:
    """δ₀ for the inexact leaves, in float32 or wider, by :func:`expected_squares` and two words."""

    def scaled(w: Leaf, squares: jax.Array, z: jax.Array) -> jax.Array:
        dtype = trees.compute_dtype(w)
        variance = (squares / _kernel_size(w, squares)).astype(dtype)
        return z.astype(dtype) * vectors.root(variance)

    gamma = jnp.asarray(gamma).astype(jnp.float32)
    normal = noise.normal_tree(words, params, gamma, draw)
    return trees.map_inexact(scaled, params, expected_squares, normal)


def expected_length(
    grads: Updates, expected_squares: PyTree, gamma: Numeric, axis_name: Axes
) -> jax.Array:
    """(E‖δ₀‖²)^½ over the leaves that have a gradient."""
    # It needs only the norms of the kernels: ‖δ₀‖ itself would take another pass over the noise.

    def held(g: Leaf, of_kernels: jax.Array) -> jax.Array:
        # The compiler would merge a sum of sums into one sum over the leaf, and read it again.
        return noise.hold(of_kernels) if jnp.size(g) > noise.SMALL else of_kernels

    squares = trees.inexact_leaves(trees.map_inexact(held, grads, expected_squares))
    dtype = vectors.accumulator_dtype(squares)
    return jnp.asarray(gamma).astype(dtype) * vectors.root(vectors.total(squares, dtype, axis_name))


def _kernel_size(leaf: Leaf, kernels: jax.Array) -> float:
    """n_j for a leaf with the given number of kernels."""
    return float(max(1, jnp.size(leaf) // max(1, kernels.size)))
