"""Slices of the loss landscape: values along one or two directions."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from sam_optax._internal import trees, vectors
from sam_optax.analysis._loss import Loss, LossLike, as_loss, native


class LossLine(NamedTuple):
    """The loss along a line through the weights.

    Attributes:
      positions: (points,) α.
      values: (points,) L(w + α d).
    """

    positions: jax.Array
    values: jax.Array


class LossPlane(NamedTuple):
    """The loss on a plane through the weights.

    Attributes:
      first: (rows,) α.
      second: (columns,) β.
      values: (rows, columns) L(w + α d₁ + β d₂).
    """

    first: jax.Array
    second: jax.Array
    values: jax.Array


def loss_line(
    loss: LossLike, params: optax.Params, direction: optax.Params, positions: Sequence[float]
) -> LossLine:
    """Evaluates the loss along a line: L(w + α d).

    Args:
      loss: a :class:`DatasetLoss`, or a function ``params -> scalar``.
      params: pytree of weights w.
      direction: d, a tree like the params, from :func:`random_direction`,
        :func:`gradient_direction`, :func:`between` or an eigenvector of the Hessian.
      positions: (points,) values α, in units of d.

    Returns:
      :class:`LossLine`.

    Raises:
      TypeError: ``loss`` is not callable.

    Example:
      >>> import jax.numpy as jnp
      >>> from sam_optax import analysis
      >>> line = analysis.loss_line(jnp.sum, jnp.zeros(2), jnp.ones(2), [-1.0, 0.0, 2.0])
      >>> print(line.values)
      [-2.  0.  4.]
    """
    alphas = jnp.asarray(positions, jnp.float32)
    values = _along(as_loss(loss), *native((params, (direction,))), alphas[:, None])
    return LossLine(alphas, values)


def loss_plane(
    loss: LossLike,
    params: optax.Params,
    first_direction: optax.Params,
    second_direction: optax.Params,
    first: Sequence[float],
    second: Sequence[float],
) -> LossPlane:
    """Evaluates the loss on a plane: L(w + α d₁ + β d₂).

    Args:
      loss: a :class:`DatasetLoss`, or a function ``params -> scalar``.
      params: pytree of weights w.
      first_direction: d₁; see :func:`loss_line`.
      second_direction: d₂.
      first: (rows,) values α, in units of d₁.
      second: (columns,) values β, in units of d₂.

    Returns:
      :class:`LossPlane`. It evaluates rows × columns losses.

    Raises:
      TypeError: ``loss`` is not callable.

    Example:
      >>> import jax.numpy as jnp
      >>> from sam_optax import analysis
      >>> plane = analysis.loss_plane(
      ...     lambda w: w[0] * w[1], jnp.ones(2), jnp.array([1.0, 0.0]), jnp.array([0.0, 1.0]),
      ...     [0.0, 1.0], [0.0, 1.0, 2.0])
      >>> print(plane.values)
      [[1. 2. 3.]
       [2. 4. 6.]]
    """
    alphas, betas = jnp.asarray(first, jnp.float32), jnp.asarray(second, jnp.float32)
    grid = jnp.stack(jnp.meshgrid(alphas, betas, indexing="ij"), axis=-1)
    directions = first_direction, second_direction
    values = _along(as_loss(loss), *native((params, directions)), grid.reshape(-1, 2))
    return LossPlane(alphas, betas, values.reshape(grid.shape[:2]))


@jax.jit
def _along(
    loss: Loss, params: optax.Params, directions: tuple[optax.Params, ...], positions: jax.Array
) -> jax.Array:
    """Losses at w + Σ position · direction, for (points, directions) positions."""
    wide = vectors.widened(params)

    def at(position: jax.Array) -> jax.Array:
        point = wide
        for alpha, direction in zip(position, directions, strict=True):
            point = vectors.add(point, vectors.scale(direction, alpha))
        point = jax.tree.map(trees.cast_like, point, trees.inexact_only(params))
        return loss(trees.merge(point, params))

    return lax.map(at, positions)
