"""Flax's TrainState for optimizers that need a gradient function."""

from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import optax
from flax.training import train_state

from sam_optax import Perturbation, SharpnessAwareState, StartState, pop_first_pass
from sam_optax._internal import checks
from sam_optax._internal.control_flow import trace_once
from sam_optax._internal.types import Function, LossAndAux, PyTree
from sam_optax.training._differentiable import require_differentiable
from sam_optax.training._overwritten import has_overwritten, of_optimized, optimized, with_optimized

_FILTER = (
    "Keep such leaves out of TrainState.params, in a field of a subclass or in the closure of the "
    "loss; for Equinox, params, static = eqx.partition(model, eqx.is_inexact_array)."
)

_SELECTED = (
    "If a wrapper around sharpness_aware chooses between two states (optax.apply_if_finite, say), "
    "it cannot return the loss of a random start: use sharpness_aware(..., skip_nonfinite=True) "
    "in its place, or apply_gradients(grads=None, grad_fn=...), which needs no loss."
)

_CLOSE_OVER = (
    "Close over this step's batch: apply_loss(lambda params: loss(params, batch)). Keyword "
    "arguments of apply_loss go to the optimizer."
)

_GROUPS = (
    "If the index of the group is missing: with sharpness_aware(groups=n), apply_loss needs "
    "sharpness_aware to be the outermost transformation. Put the others in its base optimizer."
)


class TrainState(train_state.TrainState):
    """Flax's ``TrainState`` with steps that pass a gradient function to the optimizer.

    Fields, ``create``, subclassing and checkpoints are those of
    ``flax.training.train_state.TrainState``; the optimizer may be
    :func:`sam_optax.sharpness_aware` or any other optax transformation.

    :meth:`apply_loss` is a whole training step, :meth:`apply_gradients` the part after the first
    gradient.

    Flax's overwrite-with-gradient collections (the fp8 statistics) are neither perturbed nor passed
    to the optimizer: both passes use the values of the previous step, and the gradient of the first
    pass replaces them.

    Example:
      BatchNorm and Dropout in a jitted step.

      >>> import flax.linen as nn, jax, jax.numpy as jnp, optax, sam_optax
      >>> from sam_optax.training import TrainState
      >>> class Model(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         x = nn.BatchNorm(use_running_average=False)(nn.Dense(8)(x))
      ...         return nn.Dense(1)(nn.Dropout(0.1, deterministic=False)(nn.relu(x)))
      >>> class BatchNormState(TrainState):
      ...     batch_stats: dict
      >>> model, x = Model(), jnp.ones((4, 3))
      >>> keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
      >>> variables = jax.jit(model.init)(keys, x)
      >>> state = BatchNormState.create(
      ...     apply_fn=model.apply,
      ...     tx=sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.sam(rho=0.05)),
      ...     **variables)
      >>> @jax.jit
      ... def train_step(state, x, y, key):
      ...     def loss_fn(params):
      ...         predictions, new = state.apply_fn(
      ...             {"params": params, "batch_stats": state.batch_stats}, x,
      ...             rngs={"dropout": jax.random.fold_in(key, state.step)},
      ...             mutable=["batch_stats"])
      ...         return jnp.mean((predictions - y) ** 2), new["batch_stats"]
      ...     state, (loss, batch_stats) = state.apply_loss(loss_fn, has_aux=True)
      ...     return state.replace(batch_stats=batch_stats), loss
      >>> state, loss = train_step(state, x, jnp.ones((4, 1)), jax.random.key(2))
      >>> int(state.step)
      1
    """

    @classmethod
    def create(
        cls, *, apply_fn: Any, params: PyTree, tx: optax.GradientTransformation, **kwargs: Any
    ) -> Self:
        """Creates a state at step 0, as in Flax; ``params`` may be any pytree, also of Equinox.

        Args:
          apply_fn: usually ``model.apply``; ``None`` if not needed.
          params: the params.
          tx: the optimizer.
          **kwargs: fields of a subclass.

        Returns:
          The state, with ``opt_state`` as ``tx.init`` returns it.

        Raises:
          TypeError: ``tx`` is a perturbation.
        """
        if isinstance(tx, Perturbation):
            raise TypeError(
                "tx is a Perturbation, such as sam_optax.sam() returns, which ascends: pass "
                "sam_optax.sharpness_aware(base_tx, perturbation)."
            )
        opt_state = tx.init(optimized(params))
        return cls(step=0, apply_fn=apply_fn, params=params, tx=tx, opt_state=opt_state, **kwargs)

    def apply_gradients(
        self,
        *,
        grads: PyTree,
        grad_fn: Function | None = None,
        extra_args: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Self:
        """Takes one optimizer step from a gradient.

        Args:
          grads: the gradient at ``params``, with their structure; ``None`` lets ``grad_fn``
            evaluate it. (Inside other transformations, a random start costs a third gradient here,
            but not in :meth:`apply_loss`.)
          grad_fn: ``params -> grads`` on this step's batch, with the same dropout key.
            :func:`sam_optax.sharpness_aware` needs it; other optimizers ignore it.
          extra_args: further keyword arguments of ``tx.update``, such as ``{"value": loss}``.
            Optimizers without extra arguments ignore them.
          **kwargs: fields to replace, as in Flax.

        Returns:
          The state after the step, with ``step`` incremented by one.

        Raises:
          ValueError: ``grads`` and ``grad_fn`` are both missing.
          TypeError: ``grads``, or the result of ``grad_fn``, is a pair from ``jax.value_and_grad``;
            ``grad_fn`` takes other arguments than the params.
        """
        extra = dict(extra_args or {})
        if grads is None and "value_and_grad_fn" not in extra:
            if not callable(grad_fn):
                raise ValueError(
                    "apply_gradients needs grads or grad_fn: a function of the params that returns "
                    "the gradient on this step's batch, such as "
                    "jax.grad(lambda params: loss(params, batch))."
                )
            grad_fn = checks.checked_gradient(grad_fn, self.params)
            # Some transformations need a gradient, and so do the overwritten statistics.
            if has_overwritten(self.params) or not isinstance(self.opt_state, SharpnessAwareState):
                grad_fn = trace_once(grad_fn, self.params)
                grads = grad_fn(self.params)
        elif grads is not None:
            checks.require_gradient("grads", grads, self.params)
            grad_fn = grad_fn and checks.checked_gradient(grad_fn, self.params)
        if grad_fn is not None:
            extra["grad_fn"] = of_optimized(grad_fn, self.params)
        params = optimized(self.params)
        updates, opt_state = optax.with_extra_args_support(self.tx).update(
            optimized(grads), self.opt_state, params, **extra
        )
        new_params = optax.apply_updates(params, updates)
        return self.replace(
            step=self.step + 1,
            params=with_optimized(self.params if grads is None else grads, new_params),
            opt_state=opt_state,
            **kwargs,
        )

    def apply_loss(
        self, loss_fn: Function, *args: Any, has_aux: bool = False, **extra: Any
    ) -> tuple[Self, PyTree]:
        """Takes a whole training step from a loss function.

        The first pass is at the params, or at the random start if there is one. Its loss and
        auxiliary output are returned, so statistics and metrics are updated once per step. SAM,
        ASAM, F-SAM and R-SAM evaluate two gradients; a plain optax optimizer, or a step that
        ``when`` does not perturb, evaluates one. Under jit the loss is traced once. With
        ``sharpness_aware(axis_name=...)`` loss and aux are local to each device. With
        ``sharpness_aware(groups=n)`` as the optimizer, ``loss_fn`` is called as ``loss_fn(params,
        i)``, with the index of the group, and loss and aux are means over the groups.

        The optimizer receives the loss as ``value`` (``optax.contrib.reduce_on_plateau``) unless
        ``extra`` overrides it. The step calls :meth:`apply_gradients`, so additions of a subclass
        to that method (such as an average of the params) run here too; its ``grads`` are ``None``
        or zeros if the optimizer makes the first pass.

        Args:
          loss_fn: ``params -> loss``, a scalar, or ``params -> (loss, aux)``, with aux a pytree of
            arrays. It must be the same function in both passes: same batch, same dropout key.
          *args: not allowed: ``loss_fn`` must close over the batch.
          has_aux: whether ``loss_fn`` returns ``aux``.
          **extra: keyword arguments of ``tx.update``.

        Returns:
          ``(state, loss)``, or ``(state, (loss, aux))`` with ``has_aux``.

        Raises:
          TypeError: ``loss_fn`` needs further arguments, or does not return a scalar (with
            ``has_aux`` a pair); ``params`` has a leaf that cannot be differentiated, ``extra``
            names a field of the state, a wrapper such as ``optax.apply_if_finite`` cannot return
            the loss of a random start, or aux is not floating-point with ``groups``.
          ValueError: ``groups`` with overwrite-with-gradient collections.
        """
        if args:
            raise TypeError(
                f"apply_loss takes loss_fn and no further positional arguments, got {len(args)}. "
                f"{_CLOSE_OVER}"
            )
        fields = sorted(self.__dataclass_fields__.keys() & extra.keys())
        if fields:
            raise TypeError(
                f"{', '.join(fields)}: keyword arguments of apply_loss go to the optimizer. To set "
                f"a field, use state.replace({fields[0]}=...) on the state it returns."
            )
        require_differentiable(self.params, _FILTER)
        loss_and_aux = checks.checked_loss(loss_fn, has_aux, _CLOSE_OVER)
        value_and_grad: Function = trace_once(
            jax.value_and_grad(loss_and_aux, has_aux=True), self.params
        )
        if _makes_first_pass(self.opt_state):
            state, (loss, aux) = self._apply_loss_inside(value_and_grad, extra)
        else:
            try:
                (loss, aux), grads = value_and_grad(self.params)
            except TypeError as error:
                nodes = _nodes(self.opt_state, SharpnessAwareState)
                if any(isinstance(node, SharpnessAwareState) for node in nodes):
                    error.add_note(_GROUPS)
                raise
            state = self.apply_gradients(
                grads=grads,
                grad_fn=lambda params: value_and_grad(params)[1],
                extra_args={"value": loss, **extra},
            )
        return state, (loss, aux) if has_aux else loss

    def _apply_loss_inside(
        self, value_and_grad: Function, extra: dict[str, Any]
    ) -> tuple[Self, LossAndAux]:
        """A step whose first pass the optimizer makes."""

        def value_and_grad_fn(params: PyTree, *group: jax.Array) -> PyTree:
            (loss, aux), grads = value_and_grad(with_optimized(self.params, params), *group)
            overwritten = {**grads, "params": None} if has_overwritten(grads) else None
            if group and overwritten is not None:
                raise ValueError(
                    "groups cannot be used with overwrite-with-gradient collections (the fp8 "
                    "statistics), which cannot be averaged: leave groups out."
                )
            return (loss, (aux, overwritten)), optimized(grads)

        grads = None
        if not isinstance(self.opt_state, SharpnessAwareState):
            # A random start does not use them, but transformations before it may read them.
            zeros = jax.tree.map(jnp.zeros_like, optimized(self.params))
            grads = with_optimized(self.params, zeros)
        try:
            state = self.apply_gradients(
                grads=grads, extra_args={"value_and_grad_fn": value_and_grad_fn, **extra}
            )
        except TypeError as error:
            if not isinstance(self.opt_state, SharpnessAwareState):
                error.add_note(_SELECTED)
            raise
        opt_state, (loss, (aux, overwritten)) = pop_first_pass(state.opt_state)
        params = state.params
        if overwritten is not None:
            params = with_optimized(overwritten, optimized(params))
        return state.replace(params=params, opt_state=opt_state), (loss, aux)


def _makes_first_pass(opt_state: optax.OptState) -> bool:
    """Whether ``sharpness_aware`` makes the first pass of a step.

    It knows at which params (a random start) and how (under an axis of devices) to make it. Inside
    other transformations it does so for a random start only, because transformations before it,
    such as clipping, need the gradient.
    """
    return isinstance(opt_state, SharpnessAwareState) or any(
        isinstance(start, StartState)
        for node in _nodes(opt_state, SharpnessAwareState)
        if isinstance(node, SharpnessAwareState)
        for start in _nodes(node.perturbation_state, StartState)
    )


def _nodes(tree: PyTree, kind: type | tuple[type, ...]) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind))
