"""Directions for slices of the loss: random, along the gradient, or between two checkpoints."""

from typing import Literal

import jax
import jax.numpy as jnp
import optax

from sam_optax._internal import noise, trees
from sam_optax._internal.leaf_roles import (
    AxisOverride,
    StackAxes,
    Units,
    check_stack_axes,
    unit_axes,
    unit_norm,
)
from sam_optax._internal.types import Leaf
from sam_optax._internal.vectors import unit, widened
from sam_optax.analysis._loss import LossLike, as_loss, native
from sam_optax.analysis._random import first_words, normal_like


def filter_normalized(
    direction: optax.Params,
    params: optax.Params,
    *,
    kernel_axis: AxisOverride = -1,
    stack_axes: StackAxes = 0,
    vectors: Literal["zero", "keep"] = "zero",
) -> optax.Params:
    r"""Scales a direction, kernel by kernel, to the size of the weights.

    .. math::
        d_j \leftarrow \frac{d_j}{\|d_j\|_2} \|w_j\|_2

    for every kernel (output unit, filter) j, so that α in w + α d is relative to the weights and
    slices of different networks can be compared. It does for every kernel what ASAM's filter-wise
    T_w does for convolution filters, and makes slices invariant to rescaling whole kernels.

    Args:
      direction: a tree like the params.
      params: pytree of weights w.
      kernel_axis: axis of the output unit, for leaves with two or more axes. Default −1, the layout
        of Flax and Haiku; Equinox and PyTorch need 0. A function ``(path, leaf) -> axis | None``
        decides per leaf (``None``: one kernel).
      stack_axes: the number of leading axes that stack layers, each with its own kernels (see
        :func:`sam_optax.asam`): axes are counted within a layer. Default 0.
      vectors: how to treat leaves with fewer than two axes (biases and the scales of normalization
        layers): ``"zero"``, the default and that of Li et al., sets the direction to zero there;
        ``"keep"`` treats each as one kernel.

    Returns:
      The direction, in float32 or wider; ``None`` at non-float leaves.

    Raises:
      ValueError: an unknown ``vectors``, or an axis that a leaf does not have.

    Example:
      >>> import jax.numpy as jnp
      >>> from sam_optax import analysis
      >>> w = {"kernel": jnp.array([[3.0, 0.1], [4.0, 0.0]])}
      >>> d = analysis.filter_normalized({"kernel": jnp.ones((2, 2))}, w)["kernel"]
      >>> print(jnp.linalg.norm(d, axis=0))
      [5.  0.1]

    References:
      Li et al., `Visualizing the Loss Landscape of Neural Nets
      <https://arxiv.org/abs/1712.09913>`_, 2018.
    """
    if vectors not in ("zero", "keep"):
        raise ValueError(f"vectors must be 'zero' or 'keep', got {vectors!r}.")
    check_stack_axes(stack_axes)
    params, direction = native((params, direction))
    wide = widened(params)

    def normalize(w: Leaf, d: Leaf, units: Units) -> Leaf:
        if w is None:
            return None
        if w.ndim - units.stacked < 2 and vectors == "zero":
            return jnp.zeros_like(w)
        d = trees.widen(d)
        length = unit_norm(d, units)
        factor = unit_norm(w, units) / jnp.where(length > 0, length, 1)
        return d * factor.astype(d.dtype)

    kernels = unit_axes(wide, kernel_axis, min_ndim=2, stack_axes=stack_axes)
    return jax.tree.map(normalize, wide, direction, kernels, is_leaf=trees.is_none)


def random_direction(
    params: optax.Params,
    key: noise.Key,
    *,
    kernel_axis: AxisOverride = -1,
    stack_axes: StackAxes = 0,
    vectors: Literal["zero", "keep"] = "zero",
) -> optax.Params:
    """Draws a Gaussian direction, filter-normalized.

    Args:
      params: pytree of weights w.
      key: a JAX PRNG key or an integer seed. Two keys give the two directions of a plane, nearly
        orthogonal in many dimensions.
      kernel_axis: see :func:`filter_normalized`.
      stack_axes: see :func:`filter_normalized`.
      vectors: see :func:`filter_normalized`.

    Returns:
      A tree like the params, in float32 or wider.

    Raises:
      TypeError: ``key`` is not a PRNG key.
      ValueError: see :func:`filter_normalized`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from sam_optax import analysis
      >>> w = {"kernel": jnp.full((5, 2), 2.0)}
      >>> d = analysis.random_direction(w, jax.random.key(0))
      >>> print(jnp.linalg.norm(d["kernel"], axis=0).round(3), 2 * 5**0.5)
      [4.472 4.472] 4.47213595499958

    References:
      Li et al., `Visualizing the Loss Landscape of Neural Nets
      <https://arxiv.org/abs/1712.09913>`_, 2018.
    """
    draw = normal_like(first_words(key), widened(native(params)))
    return filter_normalized(
        draw, params, kernel_axis=kernel_axis, stack_axes=stack_axes, vectors=vectors
    )


def gradient_direction(loss: LossLike, params: optax.Params) -> optax.Params:
    """The direction of steepest ascent, g/‖g‖₂, so that α is the radius ρ of SAM.

    Args:
      loss: a :class:`DatasetLoss`, or a function ``params -> scalar``.
      params: pytree of weights w.

    Returns:
      A tree like the params, in float32 or wider; zeros if the gradient is zero.

    Raises:
      TypeError: ``loss`` is not callable.

    Example:
      >>> import jax.numpy as jnp
      >>> from sam_optax import analysis
      >>> print(analysis.gradient_direction(lambda w: jnp.sum(w**2), jnp.array([3.0, 4.0])))
      [0.6 0.8]
    """
    return unit(as_loss(loss).value_and_grad(params)[1])


def between(start: optax.Params, end: optax.Params) -> optax.Params:
    """The direction from one set of weights (α = 0) to another (α = 1).

    Args:
      start: pytree of weights, the origin of the slice.
      end: a tree like it, such as another checkpoint.

    Returns:
      ``end − start``, in float32 or wider; ``None`` at non-float leaves.

    Example:
      >>> import jax.numpy as jnp
      >>> from sam_optax import analysis
      >>> print(analysis.between(jnp.array([1.0, 2.0]), jnp.array([3.0, 5.0])))
      [2. 3.]
    """
    return jax.tree.map(jnp.subtract, *map(widened, native((end, start))))
