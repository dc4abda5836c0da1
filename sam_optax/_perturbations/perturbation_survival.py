"""How much of a perturbation survives rounding."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from chex import Array
from jax.typing import DTypeLike
from optax import OptState, Params, Updates

from sam_optax._internal import trees, vectors
from sam_optax._internal.types import Leaf
from sam_optax._perturbations.perturbation import as_perturbation, perturbed_params
from sam_optax._perturbations.stochastic_rounding import round_to


class PerturbationSurvival(NamedTuple):
    """Result of :func:`sam_optax.perturbation_survival`: two float32 (or wider) scalars.

    Attributes:
      along: ⟨w̃ − w, ε⟩/‖ε‖², the share of ε that is left along ε.
      length: ‖w̃ − w‖/‖ε‖. If it is much larger than ``along``, the displacement is mostly rounding
        noise: ``along / length`` is the cosine between the displacement and ε.
    """

    along: Array
    length: Array


def perturbation_survival(
    perturbation: optax.GradientTransformation,
    params: Params,
    grads: Updates,
    state: OptState,
    *,
    compute_dtype: DTypeLike | None = None,
    perturb_dtype: DTypeLike | None = None,
    **extra: Any,
) -> PerturbationSurvival:
    r"""Measures how much of ε survives rounding, in the params that the model computes with.

    .. math::
        \langle \tilde w - w, \varepsilon \rangle / \|\varepsilon\|^2, \qquad
        \|\tilde w - w\| / \|\varepsilon\|,

    with w the params and w̃ the perturbed params, both as the model rounds them. Near (1, 1) the
    step follows its formula. At (0, 0) ε is rounded away, and SAM is its base optimizer at twice
    the cost. Near (1, large), as for float32 params that the model casts to bfloat16, ε survives on
    average, with rounding noise. It costs about one perturbation and no gradient. A compiled step
    may keep more digits than measured here, where it fuses a sum or a cast with the next operation.

    Args:
      perturbation: the perturbation.
      params: the params w.
      grads: the ascent gradient.
      state: its state, ``state.perturbation_state`` of :func:`sharpness_aware`; not advanced.
      compute_dtype: dtype to which the model casts its params. Default: no cast.
      perturb_dtype: as in :func:`sharpness_aware`.
      **extra: further arguments of the perturbation.

    Returns:
      A :class:`PerturbationSurvival`. It is (1, 1) if ε = 0.

    Example:
      >>> import jax.numpy as jnp, sam_optax
      >>> method = sam_optax.sam(rho=0.05)
      >>> params = jnp.array([1.0, 100.0, 0.001], jnp.bfloat16)
      >>> args = method, params, jnp.ones_like(params), method.init(params)
      >>> for dtype in (None, jnp.float32):
      ...     print(f"{sam_optax.perturbation_survival(*args, perturb_dtype=dtype).along:.2f}")
      0.69
      1.00
    """
    method = as_perturbation(perturbation)
    wide_grads = trees.map_inexact(trees.widen, grads)
    eps, _ = method.update(wide_grads, state, params, **extra)
    point, _ = perturbed_params(method, params, grads, state, perturb_dtype, extra)

    def moved(e: Leaf, p: Leaf, q: Leaf) -> Array:
        w, perturbed = (_as_computed(x, compute_dtype) for x in (p, q))
        dtype = trees.compute_dtype(e)
        return perturbed.astype(dtype) - w.astype(dtype)

    displacement = trees.map_inexact(moved, eps, params, point)
    squares = vectors.inner(eps, eps)
    safe = jnp.where(squares > 0, squares, 1)
    along = vectors.inner(displacement, eps) / safe
    length = jnp.sqrt(vectors.inner(displacement, displacement) / safe)
    return PerturbationSurvival(*(jnp.where(squares > 0, x, 1) for x in (along, length)))


def _as_computed(leaf: Leaf, compute_dtype: DTypeLike | None) -> Array:
    """The leaf rounded to its dtype and to ``compute_dtype``, which the compiler cannot skip."""
    leaf = jnp.asarray(leaf)
    if jnp.iscomplexobj(leaf):
        return leaf
    value = round_to(trees.widen(leaf), leaf.dtype)
    return value if compute_dtype is None else round_to(value, compute_dtype)
