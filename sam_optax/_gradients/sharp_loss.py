"""A loss function whose gradient is the sharp gradient."""

import functools
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.tree_util import PyTreeDef, keystr, tree_leaves_with_path
from optax import Params

from sam_optax._gradients.stateless import displacement, require_stateless
from sam_optax._internal import trees
from sam_optax._internal.checks import loss_and_aux
from sam_optax._internal.types import ExtraArgs, Function, PyTree

Arrays: TypeAlias = dict[int, Any]
"""The JAX arrays among the leaves of a tree, by position."""

_ALTERNATIVE = (
    "a loss cannot keep it. Use sam_optax.sharpness_aware, or alternating without a grad_fn."
)


class Call(NamedTuple):
    """The arguments of a loss function."""

    params: Params
    args: tuple[Any, ...]
    kwargs: ExtraArgs


def sharp_loss(
    loss_fn: Function, perturbation: optax.GradientTransformation, *, has_aux: bool = False
) -> Function:
    r"""Gives a loss function the gradient at the perturbed params, for any training loop.

    .. math::
        \text{value: } L(w), \qquad \text{gradient: } \nabla L(w + \varepsilon), \qquad
        \varepsilon = \mathrm{perturbation}(\nabla L(w)).

    Use it where a training loop takes a loss, draws the batches and owns the optimizer, so that
    :func:`sharpness_aware` does not receive a gradient function. Both gradients are taken with the
    same arguments; pass the batch, the dropout key and other traced arrays as such, since
    ``loss_fn`` must not close over them. The loss and aux are those at w.

    A gradient costs exactly two gradients of ``loss_fn``, and a value without a gradient costs one
    evaluation. The function works under ``jit``, ``vmap``, ``lax.scan``, ``jax.checkpoint``,
    ``pmap`` and ``shard_map``. Each example of a ``vmap`` has a separate perturbation: for one
    along the mean gradient, put ``vmap`` and the mean inside ``loss_fn``. So has each device under
    ``pmap``, and under ``shard_map`` with ``check_vma=False``.

    Args:
      loss_fn: ``(params, *args, **kwargs) -> loss``, a scalar, or ``-> (loss, aux)`` with
        ``has_aux=True``.
      perturbation: a perturbation with neither a start nor a state, since a loss cannot keep a
        state: :func:`sam`, :func:`asam`, :func:`fisher_sam`, a chain of such pieces.
      has_aux: whether ``loss_fn`` also returns aux, any pytree. Aux is not differentiated.

    Returns:
      A function with the arguments and the results of ``loss_fn``. It can be differentiated once,
      in reverse mode, with respect to its first argument. Leaves of the params that are not
      differentiated are not perturbed, and norms do not include them.

    Raises:
      TypeError: ``loss_fn`` is not a function, or ``perturbation`` is not a gradient
        transformation; (from the returned function) the loss is not a scalar, an argument other
        than the first is differentiated, or a second derivative is taken.
      ValueError: ``perturbation`` has a start or a state.

    Example:
      >>> import jax, jax.numpy as jnp, sam_optax
      >>> loss = sam_optax.sharp_loss(lambda w, x: jnp.sum(x * w**2), sam_optax.sam(rho=1.0))
      >>> value, grads = jax.value_and_grad(loss)(jnp.array([3.0, 4.0]), 1.0)
      >>> print(value, grads)  # L(3, 4) and the gradient at (3.6, 4.8)
      25.0 [7.2 9.6]

    References:
      Foret et al., `Sharpness-Aware Minimization for Efficiently Improving Generalization
      <https://arxiv.org/abs/2010.01412>`_, 2021.
    """
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function that returns the loss, got {loss_fn!r}.")
    require_stateless(perturbation, _ALTERNATIVE)

    @functools.wraps(loss_fn)
    def sharp(params: Params, /, *args: Any, **kwargs: Any) -> Any:
        call = Call(params, args, kwargs)
        arrays, rebuild = _split(call)
        rebuild_aux: Function

        def plain(arrays: Arrays) -> tuple[jax.Array, Arrays]:
            nonlocal rebuild_aux
            params, args, kwargs = rebuild(arrays)
            loss, aux = loss_and_aux(loss_fn(params, *args, **kwargs), has_aux)
            aux, rebuild_aux = _split(aux)
            return loss, aux

        loss, aux = _with_sharp_gradient(plain, perturbation, jax.tree.structure(call))(arrays)
        # Otherwise aux passed to the next call would count there as a differentiated argument.
        return (loss, rebuild_aux(lax.stop_gradient(aux))) if has_aux else loss

    return sharp


def _with_sharp_gradient(
    plain: Function, perturbation: optax.GradientTransformation, call: PyTreeDef
) -> Function:
    """``plain``, a function of the arrays of a call, with the sharp gradient for the params."""
    params = call.children()[0]

    def forward(primals: Arrays) -> tuple[Any, tuple[Arrays, Arrays]]:
        arrays = {i: primal.value for i, primal in primals.items()}
        moved = [i for i, p in primals.items() if p.perturbed]
        _refuse_other_arguments([i for i in moved if i >= params.num_leaves], call)
        w = {i: arrays.pop(i) for i in moved}
        result, grads = jax.value_and_grad(lambda w: plain({**arrays, **w}), has_aux=True)(w)
        point = _perturbed(perturbation, w, grads, params)
        return result, (_differentiable_once(point), arrays)

    def backward(residuals: tuple[Arrays, Arrays], cotangents: tuple[Any, Any]) -> tuple[Arrays]:
        point, arrays = residuals
        _, pull_back = jax.vjp(lambda w: plain({**arrays, **w})[0], point)
        # Not a multiple of the gradient: float16 needs the caller's loss scale inside, and a sum
        # over devices the cotangent of each.
        (grads,) = pull_back(cotangents[0])
        return ({**dict.fromkeys(arrays), **grads},)

    evaluated = jax.custom_vjp(plain)
    evaluated.defvjp(forward, backward, symbolic_zeros=True)
    return evaluated


def _split(tree: PyTree) -> tuple[Arrays, Function]:
    """The JAX arrays of a tree, and the function that puts arrays in their places.

    Only they can be traced. Other leaves (Python numbers, NumPy arrays, functions) stay in place.
    """
    leaves, structure = jax.tree.flatten(tree)
    found = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)}
    others = {i: leaf for i, leaf in enumerate(leaves) if i not in found}
    return found, lambda arrays: _unflatten(structure, {**others, **arrays})


def _unflatten(structure: PyTreeDef, leaves: Arrays) -> PyTree:
    """The tree with the given leaves, and ``None`` for the others."""
    return structure.unflatten(leaves.get(i) for i in range(structure.num_leaves))


def _perturbed(
    perturbation: optax.GradientTransformation, w: Arrays, grads: Arrays, structure: PyTreeDef
) -> Arrays:
    """``w + ε`` for the leaves that are differentiated."""
    # optax's convention for complex gradients is the conjugate of JAX's.
    grads = _unflatten(structure, jax.tree.map(jnp.conj, grads))
    params = _unflatten(structure, w)
    point = trees.add(params, displacement(perturbation, grads, params, _ALTERNATIVE))
    return dict(zip(w, jax.tree.leaves(point), strict=True))


@jax.custom_jvp
def _differentiable_once(point: Arrays) -> Arrays:
    return point


@_differentiable_once.defjvp
def _refuse_second_derivative(primals: Any, tangents: Any) -> Any:
    raise TypeError(
        "sharp_loss can be differentiated only once: its second derivative would differentiate "
        "through the perturbation. For second derivatives, differentiate loss_fn itself."
    )


def _refuse_other_arguments(positions: list[int], call: PyTreeDef) -> None:
    if positions:
        paths = tree_leaves_with_path(call.unflatten(range(call.num_leaves)))
        name = keystr(paths[positions[0]][0]).removeprefix(".")
        raise TypeError(
            "sharp_loss returns a function (params, *args, **kwargs) that can be differentiated "
            f"only with respect to params, but {name} is differentiated. If its derivative is not "
            "needed, pass jax.lax.stop_gradient of it; to train it, make it part of params."
        )
