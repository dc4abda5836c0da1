"""Averages of evaluations that are made one after the other."""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax import lax

from sam_optax._internal import trees


def scan_mean(f: Callable[[chex.Array], Any], n: int, like_of: Callable[[Any], Any]) -> Any:
    """The mean of ``f(0), …, f(n − 1)``, one after the other; leaves not inexact are the last's.

    ``like_of`` gives a tree of the structure of the result, whose shapes and dtypes it is given.
    Under ``shard_map`` that tree says what varies from device to device: sums start as zeros that
    vary as its leaves do.
    """

    def zero(result: Any, leaf: Any) -> Any:
        if not trees.is_inexact(result):
            return trees.zeros_like(result)
        zeros = jnp.zeros(result.shape, trees.compute_dtype(result))
        if jnp.shape(leaf) != zeros.shape:
            return zeros
        return jnp.where(jnp.zeros(zeros.shape, bool), jnp.asarray(leaf).astype(zeros.dtype), zeros)

    def body(total: Any, i: chex.Array) -> tuple[Any, None]:
        def add(t: Any, x: Any) -> Any:
            return t + jnp.asarray(x).astype(t.dtype) if trees.is_inexact(t) else x

        return jax.tree.map(add, total, f(i)), None

    result = jax.eval_shape(f, jax.ShapeDtypeStruct((), jnp.int32))
    like = like_of(result)
    total, _ = lax.scan(body, jax.tree.map(zero, result, like), jnp.arange(n, dtype=jnp.int32))

    def mean(t: Any, r: Any, leaf: Any) -> jax.Array:
        value = (t / n).astype(r.dtype)
        weak = r.weak_type and jnp.result_type(leaf) == r.dtype and jnp.shape(leaf) == r.shape
        return trees.cast_like(value, leaf) if weak else value

    return trees.map_inexact(mean, total, result, like)
