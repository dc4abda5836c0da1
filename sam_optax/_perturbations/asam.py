"""ASAM: ascent within a neighbourhood that scales with the weights."""

import functools
from typing import Any

import jax.numpy as jnp
from optax import EmptyState, Params, Updates

from sam_optax._internal import hyperparameters as hp
from sam_optax._internal import leaf_roles, trees
from sam_optax._internal.biases import resolve_biases, warn_without_biases
from sam_optax._internal.leaf_roles import AxisOverride, BiasMask, Normalization, StackAxes, Units
from sam_optax._internal.steepest_ascent import check_p, steepest_ascent
from sam_optax._internal.types import Leaf
from sam_optax._perturbations.perturbation import Perturbation, refuse_shards, require_params


def asam(
    rho: hp.Hyperparameter = 0.5,
    eta: hp.Hyperparameter = 0.01,
    *,
    p: float = hp.static_default(2),
    normalization: Normalization = "elementwise",
    bias_mask: BiasMask | None = None,
    filter_axis: AxisOverride = hp.static_default(-1),
    stack_axes: StackAxes = hp.static_default(0),
) -> Perturbation:
    r"""Adaptive SAM: perturbs each weight in proportion to its magnitude.

    .. math::
        \varepsilon = \rho\, T\, \mathrm{sign}(g)\, |T g|^{q-1} / \|T g\|_q^{q-1},
        \qquad T = T_w + \eta I,

    with 1/p + 1/q = 1, so ‖T⁻¹ε‖_p = ρ (in float32 for elements of T g between 1e−18 and 1e18).
    For p = 2, ε = ρ T² g/‖T g‖₂, and for p = ∞, ε = ρ T sign(g). The normalization operator T_w is
    ``|w|``; ``"filterwise"`` it is ‖f‖₂ for every element of a convolution filter f. For biases
    T = 1, without η, so that translations that preserve the loss also preserve ε.

    A rescaling of the weights that preserves the loss also preserves the perturbed loss and
    adaptive sharpness (theorem 1) under three conditions:

    * η = 0: with η > 0, the scale matters for weights that are not large compared with η.
    * T scales with the weights. The filter-wise T does so only for whole filters: where
      normalization follows a convolution (or a layer that is normalized element-wise), but not
      where the next convolution undoes the scale, in one input channel of each of its filters.
    * No bias with T = 1 is rescaled: hidden layers have no biases, or ``bias_mask=False``, which
      gives up the invariance to translations.

    Args:
      rho: radius ρ ≥ 0, relative to the weights. Default 0.5, the paper's for CIFAR-10 (1 for
        CIFAR-100 and ImageNet, 0.2 for IWSLT'14).
      eta: η ≥ 0, in units of the weights. Default 0.01, the paper's.
      p: norm of the neighbourhood, 1 ≤ p ≤ ∞. Default 2, the paper's for training.
      normalization: ``"elementwise"`` (default, the paper's choice) or ``"filterwise"``.
      bias_mask: which leaves are biases: a pytree of booleans (a prefix of the params) or a
        function of the params that returns one, as in ``optax.masked``. Default: biases are found
        by name, see :func:`bias_leaves`. ``False`` normalizes every leaf.
      filter_axis: the axis that indexes the filters of a convolution kernel, a leaf with four or
        more axes. Default −1, the layout of Flax and Haiku; Equinox and PyTorch need 0. A function
        ``(path, leaf) -> axis | None`` decides per leaf (``None``: no filters), as is needed for
        one-dimensional convolutions, whose kernels have three axes, as those of attention do.
      stack_axes: the number of leading axes that stack layers (``nn.scan``, ``nnx.scan``, Equinox's
        stacked blocks), or a function ``(path, leaf) -> number``. Each layer then has its own
        filters, and axes are counted within a layer. Default 0.

    Returns:
      A :class:`~sam_optax.Perturbation`, without state unless a hyperparameter is a schedule.

    Raises:
      ValueError: a hyperparameter out of range, an unknown ``normalization``, an axis that a leaf
        does not have, or ``params`` missing in ``update``.

    Warns:
      UserWarning: in ``init``, if no ``bias_mask`` is given and no leaf is named like a bias,
        although some leaves have one axis and others more.

    Example:
      >>> import jax.numpy as jnp, sam_optax
      >>> method = sam_optax.asam(rho=0.5, eta=0.0)
      >>> params = {"kernel": jnp.array([[2.0], [-0.5]]), "bias": jnp.zeros(1)}
      >>> grads = {"kernel": jnp.array([[1.0], [1.0]]), "bias": jnp.zeros(1)}
      >>> eps, _ = method.update(grads, method.init(params), params)
      >>> print(eps["kernel"][:, 0].round(4))
      [0.9701 0.0606]

    References:
      Kwon et al., `ASAM: Adaptive Sharpness-Aware Minimization for Scale-Invariant Learning of
      Deep Neural Networks <https://arxiv.org/abs/2102.11600>`_, 2021.
    """
    hp.check("rho", rho, lower=0)
    hp.check("eta", eta, lower=0)
    check_p(p)
    p = float(p)  # code that filters closures would take a NumPy scalar for an array
    if normalization not in ("elementwise", "filterwise"):
        raise ValueError(
            f"normalization must be 'elementwise' or 'filterwise', got {normalization!r}."
        )
    leaf_roles.check_stack_axes(stack_axes)

    def init_fn(params: Params) -> EmptyState:
        if bias_mask is None:
            warn_without_biases(params, stack_axes)
        return EmptyState()

    def update_fn(
        updates: Updates, state: EmptyState, params: Params, **extra: Any
    ) -> tuple[Updates, EmptyState]:
        require_params("asam", params, " with the params at which the gradient was taken.")
        rho, eta, axis_name = extra["rho"], extra["eta"], extra["norm_axis_name"]
        if normalization == "filterwise":
            user = "normalization='filterwise': a filter may be split into several shards"
            refuse_shards(axis_name, user)
        biases = resolve_biases(params, bias_mask)
        filters = leaf_roles.unit_axes(
            params, filter_axis, min_ndim=leaf_roles.CONVOLUTION_NDIM, stack_axes=stack_axes
        )

        def normalization_operator(w: Leaf, is_bias: bool, units: Units) -> Leaf:
            magnitude = jnp.abs(trees.widen(w))
            if is_bias:
                return jnp.ones((), magnitude.dtype)
            if normalization == "filterwise" and units.axis is not None:
                magnitude = leaf_roles.unit_norm(magnitude, units)
            return magnitude + jnp.asarray(eta).astype(magnitude.dtype)

        leaves = params, biases, filters
        operator = functools.partial(trees.map_inexact, normalization_operator, *leaves)
        return steepest_ascent(updates, operator, rho, p, axis_name), state

    values = {"rho": rho, "eta": eta}
    return Perturbation(init_fn, update_fn, hyperparameters=values, state_type=EmptyState)
