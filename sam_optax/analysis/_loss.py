"""The loss to measure: value, gradient and Hessian product of a scalar function of the params."""

from collections.abc import Callable
from typing import Any, TypeAlias

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from sam_optax._internal import trees
from sam_optax._internal.types import Leaf, PyTree


class Loss:
    """A scalar function of the params that is a mean over batches; a pytree, so jit takes it."""

    def mean(self, f: Callable[[Callable[[PyTree], jax.Array]], PyTree]) -> PyTree:
        """The mean over batches of ``f(loss)``, with ``loss`` the batch's function of params."""
        raise NotImplementedError

    def __call__(self, params: optax.Params) -> jax.Array:
        """L(w), a scalar."""
        return _value(self, native(params))

    def value_and_grad(self, params: optax.Params) -> tuple[jax.Array, optax.Updates]:
        """L(w) and ∇L(w), conjugated where complex; ``None`` at non-float leaves."""
        return _value_and_grad(self, native(params))

    def hvp(self, params: optax.Params, vector: optax.Params) -> optax.Params:
        """The Hessian ∇²L(w) times a vector, a tree like the gradient."""
        return _hvp(self, *native((params, vector)))


@jax.tree_util.register_pytree_node_class
class _FunctionLoss(Loss):
    """A plain function of the params."""

    def __init__(self, loss_fn: Callable[[PyTree], chex.Array]) -> None:
        self.loss_fn = loss_fn

    def mean(self, f: Callable[[Callable[[PyTree], jax.Array]], PyTree]) -> PyTree:
        return f(lambda params: scalar(self.loss_fn(params)))

    def tree_flatten(self) -> tuple[Any, Any]:
        return (), self.loss_fn

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> "_FunctionLoss":
        return cls(aux)


LossLike: TypeAlias = Loss | Callable[[optax.Params], chex.Numeric]
"""A :class:`DatasetLoss`, or any function ``params -> scalar``."""


def as_loss(loss: LossLike) -> Loss:
    """Converts a function or a :class:`DatasetLoss` to a :class:`Loss`."""
    if isinstance(loss, Loss):
        return loss
    if not callable(loss):
        raise TypeError(
            f"loss must be a function of the params or an analysis.DatasetLoss, got {loss!r}."
        )
    return _FunctionLoss(loss)


def native(tree: PyTree) -> PyTree:
    """The tree with NumPy arrays in this machine's byte order: JAX refuses the other."""

    def convert(leaf: Leaf) -> Leaf:
        swapped = isinstance(leaf, np.ndarray) and not leaf.dtype.isnative
        return leaf.astype(leaf.dtype.newbyteorder("=")) if swapped else leaf

    return jax.tree.map(convert, tree)


@jax.jit
def _value(loss: Loss, params: optax.Params) -> jax.Array:
    return loss.mean(lambda f: f(params))


@jax.jit
def _value_and_grad(loss: Loss, params: optax.Params) -> tuple[jax.Array, optax.Updates]:
    moving = trees.inexact_only(params)

    def of_batch(f: Callable[[PyTree], jax.Array]) -> tuple[jax.Array, PyTree]:
        return jax.value_and_grad(lambda m: f(trees.merge(m, params)))(moving)

    value, grads = loss.mean(of_batch)
    return value, jax.tree.map(lambda g: g.conj() if jnp.iscomplexobj(g) else g, grads)


@jax.jit
def _hvp(loss: Loss, params: optax.Params, vector: optax.Params) -> optax.Params:
    moving = trees.inexact_only(params)
    tangent = jax.tree.map(lambda m, v: jnp.asarray(v).astype(jnp.result_type(m)), moving, vector)

    def of_batch(f: Callable[[PyTree], jax.Array]) -> PyTree:
        grad_fn = jax.grad(lambda m: f(trees.merge(m, params)))
        return jax.jvp(grad_fn, (moving,), (tangent,))[1]

    return loss.mean(of_batch)


def scalar(losses: chex.Array) -> jax.Array:
    """The scalar that a loss function returned, or the mean of its examples' losses."""
    losses = jnp.asarray(losses)
    if losses.ndim > 1:
        raise ValueError(
            "loss_fn must return a scalar or one loss for each example, got an array of shape "
            f"{losses.shape}."
        )
    return jnp.mean(losses) if losses.ndim else losses
