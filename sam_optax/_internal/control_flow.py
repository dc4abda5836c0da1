"""Control flow that is ordinary Python outside of tracing."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sam_optax._internal import trees


def is_traced(*trees: Any) -> bool:
    """Whether any leaf is a tracer, so that the caller is being traced."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(trees))


def cond(pred: Any, true_fn: Callable[[], Any], false_fn: Callable[[], Any]) -> Any:
    """``lax.cond`` for a traced predicate, an ``if`` for a known one.

    Outside of jit this evaluates (and traces, and compiles) one branch only.
    """
    if isinstance(pred, jax.core.Tracer):
        return lax.cond(pred, true_fn, false_fn)
    return true_fn() if bool(pred) else false_fn()


def repeat(times: int, body: Callable[[Any], Any], carry: Any) -> Any:
    """``body`` applied ``times`` times, in a loop that is traced and compiled once."""
    if times > 1 and is_traced(carry):
        return lax.fori_loop(0, times, lambda _, c: body(c), carry)
    for _ in range(times):
        carry = body(carry)
    return carry


def all_finite(tree: Any) -> Any:
    """Whether every element of every inexact leaf is finite: a Boolean scalar."""
    finite = jnp.asarray(True)
    for leaf in trees.inexact_leaves(tree):
        finite &= jnp.all(jnp.isfinite(leaf))
    return finite
