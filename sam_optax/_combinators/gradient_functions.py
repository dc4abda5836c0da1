"""The caller's gradient and loss functions, brought to one form."""

import inspect
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
from chex import Numeric
from optax import Params, Updates

from sam_optax._internal import checks, control_flow, trees
from sam_optax._internal.types import ExtraArgs, LossAndAux

GradFn: TypeAlias = Callable[..., Updates]
"""``params -> grads``; with groups of the batch, ``(params, index) -> grads``."""

ValueAndGradFn: TypeAlias = Callable[..., tuple[LossAndAux, Updates]]
"""What ``jax.value_and_grad(loss_fn, has_aux=True)`` returns."""


class Pass(NamedTuple):
    """One evaluation of the gradient, with ``(loss, aux)`` if requested."""

    value: LossAndAux | None
    grads: Updates


Evaluation: TypeAlias = Callable[..., Pass]
"""``params -> Pass``; with groups of the batch, ``(params, index) -> Pass``."""


class Evaluations(NamedTuple):
    """The gradients that a step can evaluate.

    Attributes:
      sharp: the gradient on the step's batch, which drives the base optimizer.
      ascent: the ascent gradient; the same function unless the caller passed ``ascent_grad_fn``.
      ascent_given: whether the caller passed ``ascent_grad_fn``.
    """

    sharp: Evaluation
    ascent: Evaluation
    ascent_given: bool

    def of_group(self, i: Numeric) -> "Evaluations":
        """The gradients on one group of the batch."""
        sharp, ascent, given = self
        return Evaluations(lambda params: sharp(params, i), lambda params: ascent(params, i), given)


def evaluations(
    params: Params,
    grad_fn: GradFn | None,
    value_and_grad_fn: ValueAndGradFn | None,
    ascent_grad_fn: GradFn | None,
    extra: ExtraArgs,
    once: bool,
) -> Evaluations:
    """The caller's functions in one form; raises unless there is one gradient on the step's batch.

    Each is traced once per step. With ``once``, each is called only once, so it is not jitted.
    """
    if grad_fn is not None and value_and_grad_fn is not None:
        raise ValueError("pass grad_fn or value_and_grad_fn, not both.")

    def prepared(evaluate: Evaluation) -> Evaluation:
        evaluate = _explaining(evaluate, params)
        return evaluate if once else control_flow.trace_once(evaluate, params)

    if value_and_grad_fn is not None:
        sharp = prepared(_of_value_and_grad(value_and_grad_fn, params))
    else:
        grad_fn = _gradient_of_loss(extra) if grad_fn is None else grad_fn
        sharp = prepared(_of_grad("grad_fn", grad_fn, params))
    if ascent_grad_fn is None:
        return Evaluations(sharp, sharp, False)
    return Evaluations(sharp, prepared(_of_grad("ascent_grad_fn", ascent_grad_fn, params)), True)


def _of_grad(name: str, grad_fn: GradFn | None, params: Params) -> Evaluation:
    if grad_fn is None:
        raise ValueError(
            "sharpness_aware needs a gradient function: call update(grads, state, params, "
            "grad_fn=grad_fn), where grad_fn(params) returns the gradient on this step's batch, "
            "such as jax.grad(lambda p: loss(p, batch)). In a training loop or a wrapper that "
            "passes no keyword arguments on and does not change the updates, use "
            "sam_optax.alternating; in place of Flax's TrainState, use "
            "sam_optax.training.TrainState. Got grad_fn=None."
        )
    gradient = checks.checked_gradient(grad_fn, params, name)
    return lambda params, *group: Pass(None, gradient(params, *group))


def _explaining(evaluate: Evaluation, params: Params) -> Evaluation:
    """The evaluation, with errors that explain why a function may fail on these params."""
    leaves = jax.tree.leaves(params, is_leaf=trees.is_missing)
    missing = list(filter(trees.is_missing, leaves))
    masked = any(node is not None for node in missing)
    without = any(node is None for node in missing)
    vector = jax.tree_util.all_leaves([params]) and jax.numpy.ndim(params) == 1

    def explaining(params: Params, *group: Numeric) -> Pass:
        try:
            return evaluate(params, *group)
        except Exception as error:
            if masked:
                raise ValueError(
                    "sharpness_aware lies inside optax.partition, multi_transform or masked, which "
                    "hand it a part of the params, and the gradient function failed on that part: "
                    f"{type(error).__name__}: {error}. Put these inside sharpness_aware, as its "
                    "base optimizer, sharpness_aware(optax.partition(...), perturbation), and "
                    "choose what is perturbed with sam_optax.perturb_only(perturbation, mask), or "
                    "use sam_optax.alternating."
                ) from error
            if without:
                error.add_note(
                    "The gradient function receives the params that the optimizer was initialized "
                    "with, in which some leaves are None. If it needs the whole model, as with "
                    "tx.init(eqx.filter(model, eqx.is_inexact_array)), put the rest back: "
                    "params, static = eqx.partition(model, eqx.is_inexact_array), "
                    "grad_fn=jax.grad(lambda params: loss(eqx.combine(params, static), batch))."
                )
            if vector:
                error.add_note(
                    "sharpness_aware received params that are one vector. Put optax.flatten inside "
                    "it, not around it: sharpness_aware(optax.flatten(base_tx), perturbation)."
                )
            raise

    return explaining


def _of_value_and_grad(value_and_grad_fn: ValueAndGradFn, like: Params) -> Evaluation:
    if not callable(value_and_grad_fn):
        raise TypeError(
            "value_and_grad_fn must be a function such as jax.value_and_grad(loss_fn, "
            f"has_aux=True), got {value_and_grad_fn!r}."
        )

    def evaluate(params: Params, *group: Numeric) -> Pass:
        value, grads = value_and_grad_fn(params, *group)
        if not (isinstance(value, tuple) and len(value) == 2):
            raise TypeError(
                "value_and_grad_fn must return ((loss, aux), grads), as jax.value_and_grad("
                f"loss_fn, has_aux=True) does, got {jax.tree.structure(value)} in place of "
                "(loss, aux). Return None as aux if you have none."
            )
        checks.loss_and_aux(value, has_aux=True)
        checks.require_gradient("the gradient of value_and_grad_fn", grads, like)
        for path, leaf in jax.tree_util.tree_leaves_with_path(value[1]) if group else []:
            if not trees.is_inexact(leaf):
                raise TypeError(
                    "aux must consist of floating-point numbers with groups, since it is averaged "
                    f"over them; the leaf {jax.tree_util.keystr(path) or 'aux'} is "
                    f"{getattr(leaf, 'dtype', type(leaf).__name__)}. Return a mean over the "
                    "group's examples in place of a count, and leave other leaves out."
                )
        return Pass(value, grads)

    return evaluate


def _gradient_of_loss(extra: ExtraArgs) -> GradFn | None:
    """The gradient of the loss that a training loop passes as ``value_fn`` or ``obj_fn``.

    ``value_fn`` is optax's name for it, ``obj_fn`` Levanter's. As in optax, further arguments of
    the loss are taken from the keyword arguments of ``update``.
    """
    loss_fn = extra.get("value_fn") or extra.get("obj_fn")
    if not callable(loss_fn):
        return None
    _, *names = inspect.signature(loss_fn).parameters
    given = {name: extra[name] for name in names if name in extra}

    def grad_fn(params: Params) -> Updates:
        grads = jax.grad(lambda p: loss_fn(p, **given), allow_int=True)(params)
        # For complex params, optax descends along the conjugate of JAX's gradient.
        return trees.map_inexact(lambda g: g.conj() if jax.numpy.iscomplexobj(g) else g, grads)

    return grad_fn
