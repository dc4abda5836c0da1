"""A loss over more data than fits in one batch."""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from sam_optax._internal import hyperparameters as hp
from sam_optax._internal import trees
from sam_optax._internal.types import Leaf, PyTree
from sam_optax.analysis._loss import Loss, native, scalar


@jax.tree_util.register_pytree_node_class
class DatasetLoss(Loss):
    r"""The mean loss over a data set, evaluated batch by batch.

    .. math::
        L(w) = \sum_i n_i \ell(w, B_i) \Big/ \sum_i n_i,

    with ℓ the mean over batch B_i of n_i examples. Value, gradient and Hessian-vector product are
    each one jitted scan over the batches, in the memory of one batch, with sums in float32 or
    wider. The object is a pytree: it can be an argument of a ``jax.jit`` function, and batches may
    be sharded along the axis of examples (not of batches, which is scanned).

    ``loss_fn`` should be a deterministic function of the params: dropout off, BatchNorm with its
    running statistics, no random augmentation.

    Args:
      loss_fn: ``(params, batch) -> loss``, the batch's mean loss (a scalar), or the losses of its
        examples (a vector, which is averaged).
      batches: a pytree of arrays of shape (batches, n, …), or ``None`` if there is only
        ``remainder``.
      weights: array n_i ≥ 0, one per batch, the last for ``remainder``. Default: the number of
        examples of each batch. Pass weights for padded batches, together with a ``loss_fn`` that
        ignores the padding.
      remainder: one more batch, a pytree of arrays of shape (r, …), usually smaller than the
        others.

    Raises:
      ValueError: there are no data, leading axes differ, or weights have another shape.

    Example:
      >>> import jax.numpy as jnp
      >>> from sam_optax import analysis
      >>> loss = analysis.DatasetLoss.from_examples(
      ...     lambda w, x: 0.5 * (w - x) ** 2, jnp.array([0.0, 1.0, 5.0]), batch_size=2)
      >>> value, grad = loss.value_and_grad(jnp.array(2.0))
      >>> print(f"{value:.4f} {grad:.4f}")
      2.3333 0.0000
    """

    def __init__(
        self,
        loss_fn: Callable[[optax.Params, PyTree], chex.Array],
        batches: PyTree,
        *,
        weights: chex.Array | None = None,
        remainder: PyTree | None = None,
    ) -> None:
        batches, weights, remainder = native((batches, weights, remainder))
        self.loss_fn = loss_fn
        self.batches = batches
        self.remainder = remainder
        self._count = _leading("batches", batches)
        self._weighted = weights is not None
        rest = _leading("remainder", remainder)
        if not self._count and not rest:
            raise ValueError("batches and remainder hold no examples: pass at least one batch.")
        if weights is None:
            sizes = [_examples(batches)] * self._count + [rest] * bool(rest)
            weights = np.array(sizes, np.float32)
        count = self._count + bool(rest)
        if jnp.shape(weights) != (count,):
            raise ValueError(
                f"weights must have shape ({count},), one for each batch, got {jnp.shape(weights)}."
            )
        self.weights = jnp.asarray(weights)

    @classmethod
    def from_examples(
        cls,
        loss_fn: Callable[[optax.Params, PyTree], chex.Array],
        examples: PyTree,
        batch_size: int,
    ) -> "DatasetLoss":
        """Splits a pytree of arrays (examples, …) into batches; the last one may be smaller."""
        hp.check_integer("batch_size", batch_size, lower=1)
        examples = jax.tree.map(_as_array, examples)
        total = _leading("examples", examples)
        full = total // batch_size

        def stack(leaf: Leaf) -> Leaf:
            return leaf[: full * batch_size].reshape(full, batch_size, *leaf.shape[1:])

        rest = jax.tree.map(lambda leaf: leaf[full * batch_size :], examples)
        return cls(
            loss_fn,
            jax.tree.map(stack, examples) if full else None,
            remainder=rest if total > full * batch_size else None,
        )

    def rebatch(self, batch_size: int) -> "DatasetLoss":
        """The same examples, in the same order, in batches of another size."""
        if self._weighted:
            raise ValueError(
                "batches with explicit weights cannot be split into other batches: pass "
                "batches of the size you want."
            )
        parts = [] if self.remainder is None else [jax.tree.map(_as_array, self.remainder)]
        if self._count:
            flat = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), self.batches)
            parts.insert(0, flat)
        joined = jax.tree.map(lambda *a: a[0] if len(a) == 1 else jnp.concatenate(a), *parts)
        return self.from_examples(self.loss_fn, joined, batch_size)

    def mean(self, f: Callable[[Callable[[PyTree], jax.Array]], PyTree]) -> PyTree:
        """See :class:`Loss`."""

        def term(batch: PyTree) -> PyTree:
            return f(lambda params: scalar(self.loss_fn(params, batch)))

        def add(total: PyTree, batch: PyTree, weight: jax.Array) -> PyTree:
            def add_leaf(t: jax.Array, x: jax.Array) -> jax.Array:
                return t + jnp.asarray(weight).astype(t.dtype) * jnp.asarray(x).astype(t.dtype)

            return jax.tree.map(add_leaf, total, term(batch))

        first = self.remainder if not self._count else jax.tree.map(lambda a: a[0], self.batches)
        shapes = jax.eval_shape(term, first)
        total = jax.tree.map(lambda s: jnp.zeros(s.shape, trees.compute_dtype(s)), shapes)
        if self._count:
            total, _ = lax.scan(
                lambda t, xs: (add(t, *xs), None),
                total,
                (self.batches, self.weights[: self._count]),
            )
        if self.remainder is not None:
            total = add(total, self.remainder, self.weights[-1])
        weight = jnp.sum(self.weights)
        return jax.tree.map(
            lambda t, s: (t / weight.astype(t.dtype)).astype(s.dtype), total, shapes
        )

    def each(self, f: Callable[["DatasetLoss"], PyTree]) -> tuple[PyTree, jax.Array]:
        """``f`` of each batch's loss, evaluated sequentially and stacked, and the weights."""

        def of(batch: PyTree) -> PyTree:
            return f(DatasetLoss(self.loss_fn, None, remainder=batch))

        stacks = []
        if self._count:
            stacks.append(lax.map(of, self.batches))
        if self.remainder is not None:
            stacks.append(jax.tree.map(lambda x: x[None], of(self.remainder)))
        return jax.tree.map(lambda *a: jnp.concatenate(a), *stacks), self.weights

    def tree_flatten(self) -> tuple[Any, Any]:
        """The data are the leaves; the function is part of the structure."""
        return (self.batches, self.weights, self.remainder), (
            self.loss_fn,
            self._count,
            self._weighted,
        )

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> "DatasetLoss":
        """Inverse of :meth:`tree_flatten`, without checks: JAX may pass any objects as leaves."""
        self = object.__new__(cls)
        self.loss_fn, self._count, self._weighted = aux
        self.batches, self.weights, self.remainder = children
        return self


def _as_array(leaf: Leaf) -> Leaf:
    return leaf if isinstance(leaf, (np.ndarray, jax.Array)) else jnp.asarray(leaf)


def _leading(name: str, tree: PyTree) -> int:
    """The common size of all leading axes; 0 for a tree without leaves."""
    leaves = jax.tree.leaves(tree)
    if any(not jnp.ndim(leaf) for leaf in leaves):
        raise ValueError(f"{name} must be arrays with a leading axis, got a scalar.")
    sizes = {jnp.shape(leaf)[0] for leaf in leaves}
    if len(sizes) > 1:
        raise ValueError(f"{name} must have equal leading axes, got sizes {sorted(sizes)}.")
    return sizes.pop() if sizes else 0


def _examples(batches: PyTree) -> int:
    """The number of examples of each batch."""
    sizes = {jnp.shape(leaf)[1:2] for leaf in jax.tree.leaves(batches)}
    if not sizes:
        return 0
    if len(sizes) == 1 and sizes != {()}:
        return sizes.pop()[0]
    raise ValueError(
        "batches must share a second axis, that of the examples, to be weighted by their number: "
        "pass weights, one for each batch."
    )
