"""Control flow that is plain Python outside of tracing, where ``lax`` would compile every step."""

from collections.abc import Callable
from typing import TypeVar, cast

import jax
import jax.numpy as jnp
from chex import Array, Numeric
from jax import lax

from sam_optax._internal import devices, trees
from sam_optax._internal.types import Function, Leaf, PyTree

T = TypeVar("T")


def is_traced(*values: PyTree) -> bool:
    """Whether any leaf is a tracer, so that the caller is being traced."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values))


def trace_once(function: Function, params: PyTree) -> Function:
    """``function`` for several calls in one step, traced only once."""
    # Under jit, an inner jit shares the trace and is inlined by the compiler. Outside of jit, it
    # would compile a new function at every step.
    return jax.jit(function) if is_traced(params) else function


def jitted_on_arrays(function: Function) -> Function:
    """``function``, jitted where no caller is being traced and all keyword arguments are arrays."""
    compiled = jax.jit(function)

    def call(*args: PyTree, **kwargs: PyTree) -> PyTree:
        plain = is_traced(args, kwargs) or not trees.all_arrays(kwargs)
        return (function if plain else compiled)(*args, **kwargs)

    return call


def cond(pred: Numeric, true_fn: Callable[[], T], false_fn: Callable[[], T]) -> T:
    """``lax.cond`` for a traced predicate; for a concrete one, only one branch is evaluated."""
    if isinstance(pred, jax.core.Tracer):
        return cast(T, lax.cond(pred, true_fn, false_fn))
    return true_fn() if bool(pred) else false_fn()


def repeat(times: int, body: Callable[[T], T], carry: T) -> T:
    """``body`` applied ``times`` times, in a loop that is traced and compiled once."""
    if times > 1 and is_traced(carry):
        return cast(T, lax.fori_loop(0, times, lambda _, c: body(c), carry))
    for _ in range(times):
        carry = body(carry)
    return carry


def mean_of(f: Callable[[Array], T], n: int, params: PyTree) -> T:
    """The mean of ``f(0), …, f(n − 1)``, computed sequentially; non-float leaves are the last ones.

    Sums are taken in float32 or wider. If ``params`` are traced, ``f`` is traced and compiled once.
    """

    def add(total: PyTree, x: PyTree) -> PyTree:
        return jax.tree.map(
            lambda t, y: t + jnp.asarray(y).astype(t.dtype) if trees.is_inexact(t) else y, total, x
        )

    if not is_traced(params):
        first = f(jnp.asarray(0, jnp.int32))
        total = trees.map_inexact(trees.widen, first)
        for i in range(1, n):
            total = add(total, f(jnp.asarray(i, jnp.int32)))
        return cast(T, trees.map_inexact(lambda t, x: trees.cast_like(t / n, x), total, first))

    shapes = jax.eval_shape(f, jax.ShapeDtypeStruct((), jnp.int32))
    zeros = jax.tree.map(devices.zeros, shapes)
    indices = jnp.arange(n, dtype=jnp.int32)
    start = trees.map_inexact(trees.widen, zeros)
    total, _ = lax.scan(lambda t, i: (add(t, f(i)), None), start, indices)

    def mean(total: Leaf, like: Leaf, shape: Leaf) -> Leaf:
        if shape.weak_type:  # of a default dtype of Python numbers: a Python zero has both
            like = jnp.broadcast_to(jnp.asarray(0.0), like.shape)
        return trees.cast_like(total / n, like)

    return cast(T, trees.map_inexact(mean, total, zeros, shapes))
