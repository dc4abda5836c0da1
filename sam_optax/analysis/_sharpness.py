"""Sharpness and adaptive sharpness: the largest rise of the loss within a radius."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import sam_optax
from sam_optax._internal import hyperparameters as hp
from sam_optax._internal import noise, trees
from sam_optax._internal.leaf_roles import AxisOverride, BiasMask, Normalization, StackAxes
from sam_optax._internal.steepest_ascent import check_p
from sam_optax._internal.types import PyTree
from sam_optax.analysis._ascent import Ascent, maximize
from sam_optax.analysis._dataset import DatasetLoss
from sam_optax.analysis._loss import LossLike, as_loss, native
from sam_optax.analysis._random import first_words


class Sharpness(NamedTuple):
    """A lower bound of the largest rise of the loss, and the ε that attains it.

    Attributes:
      value: scalar, L(w + ε) − L(w) ≥ 0 in the unit of the loss. Every ε tried lies within the
        radius, so the maximum that it approximates is at least this. It is a difference of two
        losses: values below the resolution of their dtype (10⁻⁷ of the loss in float32) are
        rounding error.
      eps: ε, a tree like the gradient; ``None`` for m-sharpness, where each group has a separate ε.
      loss: scalar, L(w).
      one_step: scalar, the rise after the first step from w, which is SAM's or ASAM's ε: the
        papers' cheap estimate. It can be negative. If it is far below ``value``, the loss is not
        linear within the radius.
      starts: (1 + restarts,) the rise reached from each start, w itself first. If they disagree,
        more starts may find a larger rise.
      groups: (groups,) the value of each group for m-sharpness, else ``None``.
    """

    value: jax.Array
    eps: optax.Params | None
    loss: jax.Array
    one_step: jax.Array
    starts: jax.Array
    groups: jax.Array | None = None


def sharpness(
    loss: LossLike,
    params: optax.Params,
    rho: float = 0.05,
    *,
    p: float = 2,
    steps: int = 20,
    restarts: int = 2,
    key: noise.Key | None = None,
    group_size: int | None = None,
) -> Sharpness:
    r"""Measures sharpness: the largest rise of the loss within a p-norm ball of radius ρ.

    .. math::
        \max_{\|\varepsilon\|_p \le \rho} L(w + \varepsilon) - L(w),

    equation (2) of the ASAM paper, approximated from below by projected gradient ascent along the
    steepest ascent directions of :func:`sam_optax.sam`. Steps that do not raise the loss are
    rejected and halved. The first start is w; restarts are random points on the sphere, in opposite
    pairs, and find rises that an ascent from a point with zero gradient cannot find. Projection is
    exact for p = 2 and p = ∞; for other p, points are rescaled into the ball.

    ``steps=1, restarts=0`` is the one-step estimate, at the cost of one gradient and one loss. In
    general the cost is (1 + restarts) · steps gradients.

    Args:
      loss: a :class:`DatasetLoss`, or a function ``params -> scalar``. It must be deterministic:
        dropout off, frozen BatchNorm statistics.
      params: pytree of weights w. Non-float leaves are not perturbed.
      rho: radius ρ ≥ 0, in units of the weights. Default 0.05, SAM's for CIFAR-10.
      p: norm of the ball, 1 ≤ p ≤ ∞. Default 2, as in the papers.
      steps: number of gradients per start, an integer ≥ 1. Default 20.
      restarts: number of random starts in addition to w, an integer ≥ 0. Default 2, two opposite
        points.
      key: a JAX PRNG key, or an integer seed, for the restarts. Default: always the same one.
      group_size: m of m-sharpness, the mean over groups of m examples (in order) of the maximum for
        each group. The SAM paper defines it, and the ASAM paper uses it with m = 8 for the
        correlation with the generalization gap (first arXiv version, appendix B). All groups share
        their random starts. Default: one group of all examples.

    Returns:
      A :class:`Sharpness`.

    Raises:
      TypeError: ``loss`` is not callable, ``key`` is not a PRNG key, ``steps`` or ``restarts`` is
        not an integer, or ``group_size`` is given without a :class:`DatasetLoss`.
      ValueError: an argument out of range.

    Example:
      >>> import jax.numpy as jnp
      >>> from sam_optax import analysis
      >>> found = analysis.sharpness(
      ...     lambda w: 2 * w[0] ** 2 + w[1] ** 2 / 2, jnp.zeros(2), rho=0.1)
      >>> print(f"{found.value:.4f}, one step from the minimum {found.one_step:.4f}")
      0.0200, one step from the minimum 0.0000

    References:
      Foret et al., `Sharpness-Aware Minimization for Efficiently Improving Generalization
      <https://arxiv.org/abs/2010.01412>`_, 2021.
    """
    return _measure(loss, params, None, rho, p, steps, restarts, key, group_size)


def adaptive_sharpness(
    loss: LossLike,
    params: optax.Params,
    rho: float = 0.5,
    eta: float = 0.0,
    *,
    p: float = 2,
    normalization: Normalization = "elementwise",
    bias_mask: BiasMask | None = None,
    filter_axis: AxisOverride = -1,
    stack_axes: StackAxes = 0,
    steps: int = 20,
    restarts: int = 2,
    key: noise.Key | None = None,
    group_size: int | None = None,
) -> Sharpness:
    r"""Measures adaptive sharpness: the largest rise of the loss in a ball scaled by the weights.

    .. math::
        \max_{\|T_w^{-1} \varepsilon\|_p \le \rho} L(w + \varepsilon) - L(w),

    definition 2 of the ASAM paper, with the operator T_w (+ ηI) of :func:`sam_optax.asam`, fixed at
    w. It is approximated in the same way as :func:`sharpness`.

    A rescaling of the weights that preserves the loss changes sharpness. It preserves adaptive
    sharpness (theorem 1) under three conditions: η = 0, the default; T_w scales with what is
    rescaled, which the element-wise operator always does and the filter-wise one only for whole
    filters; and no bias is rescaled, which for networks with biases in hidden layers requires
    ``bias_mask=False``. By default biases are not normalized, and translating them preserves
    adaptive sharpness instead. See :func:`sam_optax.asam`.

    Args:
      loss: see :func:`sharpness`.
      params: see :func:`sharpness`.
      rho: radius ρ ≥ 0, relative to the weights. Default 0.5, ASAM's for CIFAR-10. For the
        correlation with the generalization gap, the authors tuned it to 0.005 for p = 2 and 0.0005
        for p = ∞ (first arXiv version, appendix B).
      eta: η ≥ 0, in units of the weights. Default 0, as in the definition; weights that are zero
        then stay zero. (Training uses 0.01, for stability.)
      p: see :func:`sharpness`.
      normalization: see :func:`sam_optax.asam`.
      bias_mask: see :func:`sam_optax.asam`.
      filter_axis: see :func:`sam_optax.asam`.
      stack_axes: see :func:`sam_optax.asam`.
      steps: see :func:`sharpness`.
      restarts: see :func:`sharpness`.
      key: see :func:`sharpness`.
      group_size: see :func:`sharpness`.

    Returns:
      A :class:`Sharpness`.

    Raises:
      TypeError: see :func:`sharpness`.
      ValueError: an argument out of range, or an unknown ``normalization``.

    Warns:
      UserWarning: see :func:`sam_optax.asam`.

    Example:
      >>> import jax.numpy as jnp
      >>> from sam_optax import analysis
      >>> loss = lambda w: jnp.square(w["in"] * w["out"] - 1.0)
      >>> for a in (1.0, 10.0):
      ...     w = {"in": jnp.array(2.0 * a), "out": jnp.array(0.5 / a)}
      ...     adaptive = analysis.adaptive_sharpness(loss, w, rho=0.1).value
      ...     print(f"{adaptive:.4f} {analysis.sharpness(loss, w, rho=0.1).value:.4f}")
      0.0214 0.0436
      0.0214 4.0002

    References:
      Kwon et al., `ASAM: Adaptive Sharpness-Aware Minimization for Scale-Invariant Learning of
      Deep Neural Networks <https://arxiv.org/abs/2102.11600>`_, 2021.
    """
    # The p = ∞ perturbation of radius 1 for a gradient of ones is T itself.
    method = sam_optax.asam(
        1.0,
        eta,
        p=math.inf,
        normalization=normalization,
        bias_mask=bias_mask,
        filter_axis=filter_axis,
        stack_axes=stack_axes,
    )
    wide = trees.map_inexact(trees.widen, trees.inexact_only(native(params)))
    ones = jax.tree.map(lambda w: jnp.ones(w.shape, w.real.dtype), wide)
    scaling, _ = method.update(ones, method.init(wide), wide)
    return _measure(loss, params, scaling, rho, p, steps, restarts, key, group_size)


def _measure(
    loss: LossLike,
    params: optax.Params,
    scaling: optax.Params | None,
    rho: float,
    p: float,
    steps: int,
    restarts: int,
    key: noise.Key | None,
    group_size: int | None,
) -> Sharpness:
    params = native(params)
    hp.check("rho", rho, lower=0, schedule=False)
    check_p(p)
    hp.check_integer("steps", steps, lower=1)
    hp.check_integer("restarts", restarts, lower=0)
    words = first_words(key)

    chosen = {"p": float(p), "steps": steps, "restarts": restarts}
    if group_size is None:
        found = maximize(as_loss(loss), params, scaling, rho, words, **chosen)
        return Sharpness(jnp.max(found.starts), found.eps, found.loss, found.one_step, found.starts)
    if not isinstance(loss, DatasetLoss):
        raise TypeError(
            f"group_size={group_size} needs single examples: pass an analysis.DatasetLoss, got "
            f"{loss!r}."
        )
    groups, weights = _maximize_each(
        loss.rebatch(group_size), params, scaling, rho, words, **chosen
    )

    def mean(x: jax.Array) -> jax.Array:
        return jnp.average(x, axis=0, weights=weights.astype(x.dtype))

    return Sharpness(
        mean(groups.value),
        None,
        mean(groups.loss),
        mean(groups.one_step),
        mean(groups.starts),
        groups.value,
    )


@functools.partial(jax.jit, static_argnames=("p", "steps", "restarts"))
def _maximize_each(loss: DatasetLoss, *args: Any, **chosen: PyTree) -> tuple[Ascent, jax.Array]:
    """:func:`maximize` of the loss of each batch, without ε, and the weights."""
    return loss.each(lambda group: maximize(group, *args, **chosen)._replace(eps=None))
