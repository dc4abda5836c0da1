"""The second pass of a Flax NNX training step."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from sam_optax.training._differentiable import require_differentiable

_FILTER = (
    "Let wrt select the Variables that are trained, as in nnx.Optimizer(model, tx, wrt=nnx.Param)."
)


def nnx_grad_fn(
    model: Any,
    loss_fn: Callable[[Any], Any],
    wrt: Any = nnx.Param,
    *,
    has_aux: bool = False,
) -> Callable[[Any], Any]:
    """A gradient function of the params for ``optimizer.update(model, grads, grad_fn=...)``.

    It takes the model as it is now and never changes it. Made *before* the first pass, it draws
    from the same RNG streams at the same counts, so that dropout masks are those of the first
    pass; that pass alone then advances the streams and the BatchNorm statistics, once a step.

    A random start (:func:`sam_optax.rsam`) evaluates its own first gradient and does not use
    ``grads``: the loss and the statistics are still those at the params, for which the step makes
    a third forward pass (under jit the compiler drops its backward one).

    Args:
      model: an NNX module.
      loss_fn: ``model -> loss``, or ``model -> (loss, aux)``, on this step's batch.
      wrt: filter of the Variables to differentiate, the one of the optimizer and of
        ``nnx.value_and_grad``. Default: ``nnx.Param``.
      has_aux: whether ``loss_fn`` returns ``aux``, which is dropped.

    Returns:
      ``grad_fn(params) -> grads``, both of the structure of ``nnx.state(model, wrt)`` with arrays
      as leaves.

    Raises:
      TypeError: (from ``grad_fn``) ``wrt`` selects a Variable that cannot be differentiated.

    Example:
      >>> import jax.numpy as jnp, optax, sam_optax
      >>> from flax import nnx
      >>> from sam_optax.training import nnx_grad_fn
      >>> class Model(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.hidden = nnx.Linear(3, 8, rngs=rngs)
      ...         self.norm = nnx.BatchNorm(8, rngs=rngs)
      ...         self.dropout = nnx.Dropout(0.1, rngs=rngs)
      ...         self.out = nnx.Linear(8, 1, rngs=rngs)
      ...     def __call__(self, x):
      ...         return self.out(self.dropout(nnx.relu(self.norm(self.hidden(x)))))
      >>> model = Model(nnx.Rngs(0))
      >>> tx = sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.sam(rho=0.05))
      >>> optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
      >>> @nnx.jit
      ... def train_step(model, optimizer, x, y):
      ...     def loss_fn(model):
      ...         return jnp.mean((model(x) - y) ** 2)
      ...     grad_fn = nnx_grad_fn(model, loss_fn)  # before the first pass
      ...     loss, grads = nnx.value_and_grad(loss_fn)(model)
      ...     optimizer.update(model, grads, grad_fn=grad_fn)
      ...     return loss
      >>> loss = train_step(model, optimizer, jnp.ones((4, 3)), jnp.ones((4, 1)))
      >>> int(model.dropout.rngs.count[...])  # drawn from once
      1
    """
    graphdef, params_now, rest = nnx.split(model, wrt, ...)  # type: ignore[misc]
    structure = jax.tree.structure(params_now)
    # The arrays as they are now: a Variable here may be the model's own and change with it.
    rest_leaves, rest_structure = jax.tree.flatten(rest)

    def grad_fn(params: Any) -> Any:
        require_differentiable(params, _FILTER)

        def loss(params: Any) -> Any:
            copy = nnx.merge(
                graphdef,
                jax.tree.unflatten(structure, jax.tree.leaves(params)),
                jax.tree.unflatten(rest_structure, rest_leaves),
            )
            value = loss_fn(copy)
            return value[0] if has_aux else value

        return jax.grad(loss)(params)

    return grad_fn
