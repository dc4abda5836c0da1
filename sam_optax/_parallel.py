"""Averages over devices and over microbatches."""

from collections.abc import Callable
from typing import Any, TypeAlias

import chex
import jax
import jax.numpy as jnp
import optax
from jax import lax

from sam_optax import _trees
from sam_optax._hyperparameters import check_integer

AxisName: TypeAlias = str | tuple[str, ...]


def accumulate(
    grad_fn: Callable[[optax.Params, chex.Numeric], optax.Updates], n: int
) -> Callable[[optax.Params], optax.Updates]:
    r"""A gradient function that averages over n microbatches, one after the other.

    .. math::
        g(w) = \frac{1}{n} \sum_{i=0}^{n-1} \mathrm{grad\_fn}(w, i).

    With it, both passes of a sharpness-aware step are taken over the whole batch in the memory
    of one microbatch. ``optax.MultiSteps`` around ``sharpness_aware`` is something else: its
    ascent gradient is the average, but its second pass sees the last microbatch alone.
    ``MultiSteps`` *inside*, as the base optimizer, averages n complete sharpness-aware
    gradients (m-sharpness over time), and is right.

    Args:
      grad_fn: ``(params, i) -> grads``, the gradient on microbatch i (int32 scalar), a mean over
        its examples. Microbatches have the same size.
      n: number of microbatches, an integer ≥ 1.

    Returns:
      ``params -> grads``, for ``update(..., grad_fn=...)``. Sums are taken in float32 or wider.

    Raises:
      ValueError: ``n`` < 1.

    Example:
      >>> import jax, jax.numpy as jnp, sam_optax
      >>> a = jnp.array([1.0, 3.0])
      >>> grad_fn = sam_optax.accumulate(jax.grad(lambda w, i: 0.5 * a[i] * w**2), 2)
      >>> print(grad_fn(jnp.array(1.0)))
      2.0
    """
    check_integer("n", n, lower=1)

    def mean_grad(params: optax.Params) -> optax.Updates:
        return scan_mean(lambda i: grad_fn(params, i), n, lambda _: params)

    return mean_grad


def scan_mean(f: Callable[[chex.Array], Any], n: int, like_of: Callable[[Any], Any]) -> Any:
    """The mean of ``f(0), …, f(n − 1)``, one after the other; leaves not inexact are the last's.

    ``like_of`` gives a tree of the structure of the result, whose shapes and dtypes it is given.
    Under ``shard_map`` that tree says what varies from device to device: sums start as zeros that
    vary as its leaves do.
    """

    def zero(result: Any, leaf: Any) -> Any:
        if not _trees.is_inexact(result):
            return _trees.zeros_like(result)
        zeros = jnp.zeros(result.shape, _trees.compute_dtype(result))
        if jnp.shape(leaf) != zeros.shape:
            return zeros
        return jnp.where(jnp.zeros(zeros.shape, bool), jnp.asarray(leaf).astype(zeros.dtype), zeros)

    def body(total: Any, i: chex.Array) -> tuple[Any, None]:
        def add(t: Any, x: Any) -> Any:
            return t + jnp.asarray(x).astype(t.dtype) if _trees.is_inexact(t) else x

        return jax.tree.map(add, total, f(i)), None

    result = jax.eval_shape(f, jax.ShapeDtypeStruct((), jnp.int32))
    like = like_of(result)
    total, _ = lax.scan(body, jax.tree.map(zero, result, like), jnp.arange(n, dtype=jnp.int32))

    def mean(t: Any, r: Any, leaf: Any) -> jax.Array:
        value = (t / n).astype(r.dtype)
        weak = r.weak_type and jnp.result_type(leaf) == r.dtype and jnp.shape(leaf) == r.shape
        return _trees.cast_like(value, leaf) if weak else value

    return _trees.map_inexact(mean, total, result, like)


def pmean(tree: Any, axis_name: AxisName | None) -> Any:
    """The mean over the axis of the inexact leaves."""
    if axis_name is None:
        return tree
    return _trees.map_inexact(lambda leaf: lax.pmean(leaf, axis_name), tree)


def _axes(axis_name: AxisName | None) -> tuple[str, ...]:
    if axis_name is None:
        return ()
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)


def draw_index(
    axis_name: AxisName | None, groups: int | None, group: tuple[chex.Numeric, ...]
) -> chex.Numeric | None:
    """Tells the devices' and the groups' random draws apart; ``None`` where there is one draw."""
    if not _axes(axis_name) and not group:
        return None
    index = jnp.zeros((), jnp.int32)
    for axis in _axes(axis_name):
        index = index * lax.psum(1, axis) + lax.axis_index(axis)
    for i in group:
        index = index * (groups or 1) + i
    return index


def local(tree: Any, axis_name: AxisName | None) -> Any:
    """The tree, marked as a device's own, so that gradients with respect to it are local.

    Under ``jax.shard_map`` with ``check_vma=True``, the gradient with respect to a replicated
    value is summed over the axis. ``jax.grad(loss)(sam_optax.local(params, axis_name))`` is this
    device's gradient. Elsewhere (``jax.pmap``, ``check_vma=False``) gradients are local anyway,
    and this is the identity.

    Args:
      tree: a pytree of arrays.
      axis_name: the axis or axes of the devices.

    Returns:
      The same values.

    Example:
      >>> import jax, jax.numpy as jnp, sam_optax
      >>> jax.pmap(lambda w: sam_optax.local(w, "batch"), axis_name="batch")(jnp.ones(1))
      Array([1.], dtype=float32)
    """

    def cast(leaf: Any) -> Any:
        for axis in _axes(axis_name):
            leaf = _vary(leaf, axis)
        return leaf

    return _trees.map_inexact(cast, tree)


def _vary(leaf: Any, axis: str) -> Any:
    try:
        if hasattr(lax, "pcast"):
            return lax.pcast(leaf, axis, to="varying")
        return lax.pvary(leaf, axis) if hasattr(lax, "pvary") else leaf
    except ValueError:  # it varies already, or the axis is not one of shard_map's
        return leaf


def is_replicated(leaf: Any, axis_name: AxisName | None) -> bool:
    """Whether the type system knows that all devices hold the same value."""
    if not hasattr(jax, "typeof") or not isinstance(leaf, jax.Array):
        return False
    return any(jax.typeof(_vary(leaf, axis)) != jax.typeof(leaf) for axis in _axes(axis_name))


def check_local(grads: optax.Updates, axis_name: AxisName | None) -> None:
    """Raises for a gradient that ``shard_map`` has summed over the axis."""
    if any(is_replicated(leaf, axis_name) for leaf in _trees.inexact_leaves(grads)):
        raise ValueError(
            f"grads must be each device's own gradient, but is the same on all devices of "
            f"axis_name={axis_name!r}: under jax.shard_map with check_vma=True the gradient with "
            "respect to replicated params is summed over the axis. Pass None, or the gradient "
            "at sam_optax.local(params, axis_name)."
        )
