"""Noise for weights, with a scale that follows the norm of each kernel."""

from typing import Literal, TypeAlias, get_args

import chex
import jax
import jax.numpy as jnp
from optax import Params, Updates

from sam_optax._internal import noise, trees, vectors
from sam_optax._internal.devices import AxisName
from sam_optax._internal.leaf_roles import AxisOverride, StackAxes, Units, unit_axes, unit_squares
from sam_optax._internal.types import Leaf, PyTree

NoiseScale: TypeAlias = Literal["relative", "sqrt_norm", "norm", "isotropic"]
"""The standard deviation of an element of kernel j, of n_j elements, in units of gamma.

``"relative"``: ‖w_j‖/√n_j; ``"sqrt_norm"``: ‖w_j‖^½; ``"norm"``: ‖w_j‖; ``"isotropic"``: 1.
"""


def check_noise_scale(noise_scale: object) -> None:
    """Raises unless ``noise_scale`` is one of the names."""
    if noise_scale not in get_args(NoiseScale):
        known = ", ".join(repr(name) for name in get_args(NoiseScale))
        raise ValueError(f"noise_scale must be one of {known}, got {noise_scale!r}.")


def expected_squares(
    params: Params, noise_scale: NoiseScale, kernel_axis: AxisOverride, stack_axes: StackAxes
) -> jax.Array:
    """E‖δ_j‖²/γ² of each kernel's noise δ_j, broadcastable to the leaf.

    Args:
      params: pytree of weights w.
      noise_scale: the meaning of γ.
      kernel_axis: axis of the output unit of leaves with two or more axes.
      stack_axes: number of leading axes that stack layers.
    """

    def of_leaf(w: Leaf, units: Units) -> jax.Array:
        w = trees.widen(w)
        if noise_scale == "isotropic":
            return jnp.full((1,) * w.ndim, w.size, vectors.accumulator_dtype([w]))
        squares = unit_squares(w, units)
        if noise_scale == "relative":
            return squares
        size = _kernel_size(w, squares)
        return size * (vectors.root(squares) if noise_scale == "sqrt_norm" else squares)

    return trees.map_inexact(
        of_leaf, params, unit_axes(params, kernel_axis, min_ndim=2, stack_axes=stack_axes)
    )


def kernel_noise(
    params: Params,
    expected_squares: PyTree,
    words: chex.Array,
    gamma: chex.Numeric,
    draw: noise.Draw | None,
) -> PyTree:
    """δ₀ for the inexact leaves, in float32 or wider.

    Args:
      params: pytree of weights w.
      expected_squares: see :func:`expected_squares`.
      words: uint32 words that determine the noise.
      gamma: scale γ.
      draw: generator of noise with mean 0 and variance 1; ``None`` is the library's.
    """

    def scaled(w: Leaf, squares: jax.Array, z: jax.Array) -> jax.Array:
        dtype = trees.compute_dtype(w)
        variance = (squares / _kernel_size(w, squares)).astype(dtype)
        return z.astype(dtype) * vectors.root(variance)

    gamma = jnp.asarray(gamma).astype(jnp.float32)
    return trees.map_inexact(
        scaled, params, expected_squares, noise.normal_tree(words, params, gamma, draw)
    )


def expected_length(
    grads: Updates, expected_squares: PyTree, gamma: chex.Numeric, axis_name: AxisName | None
) -> jax.Array:
    """(E‖δ₀‖²)^½ over the leaves that have a gradient.

    It needs only the norms of the kernels: ‖δ₀‖ itself would take another pass over the noise.
    """
    squares: list[jax.Array] = []

    def add(g: Leaf, of_kernels: jax.Array) -> None:
        # The compiler would merge a sum of sums into one sum over the leaf, and read it again.
        squares.append(noise.hold(of_kernels) if jnp.size(g) > noise.SMALL else of_kernels)

    trees.map_inexact(add, grads, expected_squares)
    dtype = vectors.accumulator_dtype(squares)
    return jnp.asarray(gamma).astype(dtype) * vectors.root(vectors.total(squares, dtype, axis_name))


def _kernel_size(leaf: Leaf, kernels: jax.Array) -> float:
    """n_j for a leaf with the given number of kernels."""
    return float(max(1, jnp.size(leaf) // max(1, kernels.size)))
