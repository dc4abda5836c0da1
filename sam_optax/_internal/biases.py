"""Finds the biases, by the names that frameworks give them or by the caller's mask."""

import re
import warnings
from collections.abc import Iterator

import jax
import numpy as np
from optax import Params

from sam_optax._internal import trees
from sam_optax._internal.leaf_roles import BiasMask, StackAxes, expand_mask, layer_of
from sam_optax._internal.types import KeyPath, PyTree

# Whole names of Haiku and hand-written layers (b, b1), of Haiku's and Keras' normalization layers,
# or a part between underscores: bias, bias_n, hn_bias, in_proj_bias, bias_ih_l0.
_BIAS_NAME = re.compile(r"b(_?\d+)?|offset|beta|(.*_)?bias(es)?(_.*)?")
# Suffixes that containers add to a leaf's name: Flax NNX and penzai, haliax, penzai's arrays.
_BOX_NAMES = {"value", "raw_value", "array", "data_array"}


def _names(path: KeyPath) -> Iterator[str]:
    """The names along a path, last first, without indices; ``"a/b"`` and ``"a.b"`` are split."""
    for entry in reversed(path):
        kinds = [kind for kind in ("key", "name", "idx") if hasattr(entry, kind)]
        names = re.split(r"[./]", str(getattr(entry, kinds[0]) if kinds else entry))
        yield from (name for name in reversed(names) if name and not name.isdigit())


def _is_bias(path: KeyPath) -> bool:
    names = list(_names(path))
    while len(names) > 1 and names[0] in _BOX_NAMES:
        names.pop(0)
    return bool(names and _BIAS_NAME.fullmatch(names[0]))


def bias_leaves(params: Params) -> PyTree:
    """Shows which leaves :func:`asam` treats as biases: one Boolean per leaf, by its name.

    The last name on a leaf's path decides. A bias is called

    * ``bias``, alone or between underscores: ``bias_n``, ``hn_bias``, ``in_proj_bias``,
      ``bias_ih_l0`` (Flax, Equinox, haliax, Keras, PyTorch);
    * ``b`` or ``b1`` (Haiku, hand-written layers);
    * ``offset`` (Haiku's normalization layers) or ``beta`` (Keras').

    The shifts of normalization layers are biases and their scales are not, as in the ASAM authors'
    code, which normalizes parameters named ``weight``. Indices at the end of a path (``bias[0]``)
    and the boxes of Flax NNX, haliax and penzai are skipped, and names such as ``"dense/bias"`` or
    ``"rnn.bias_ih_l0"`` are split. No biases can be found in a list without names.

    Args:
      params: pytree of weights w.

    Returns:
      A pytree of booleans with the structure of the params, valid as ``asam(bias_mask=...)``.

    Example:
      >>> import jax.numpy as jnp, sam_optax
      >>> params = {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2), "shift": jnp.ones(2)}
      >>> found = sam_optax.bias_leaves(params)
      >>> print(found)
      {'bias': True, 'kernel': False, 'shift': False}
      >>> method = sam_optax.asam(bias_mask=found | {"shift": True})
    """
    return jax.tree_util.tree_map_with_path(lambda path, _: _is_bias(path), params)


def resolve_biases(params: Params, bias_mask: BiasMask | None) -> PyTree:
    """One Boolean per leaf: whether it is a bias, by the caller's mask or by its name."""
    return bias_leaves(params) if bias_mask is None else expand_mask("bias_mask", bias_mask, params)


def warn_without_biases(params: Params, stack_axes: StackAxes) -> None:
    """Warns if no leaf is named like a bias although some have one axis, and others more."""
    found = [
        (path, np.ndim(layer_of(stack_axes, path, leaf)[1]))
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if trees.is_inexact(leaf)
    ]
    vectors = [path for path, ndim in found if ndim == 1]
    matrices = any(ndim > 1 for _, ndim in found)
    if not (vectors and matrices) or any(_is_bias(path) for path, _ in found):
        return
    shown = ", ".join(map(jax.tree_util.keystr, vectors[:3])) + ", …" * (len(vectors) > 3)
    why = "no leaf of the params is called a bias"
    if not any(list(_names(path)) for path, _ in found):
        why = "the params have no names, as Keras' list of variables has none"
    # At a single line of code, so that Python's default filter shows it once.
    warnings.warn(
        f"asam found no biases: {why}. Leaves with one axis ({shown}) are normalized like "
        "weights. If some are biases, name them in bias_mask; sam_optax.bias_leaves(params) shows "
        "what is found. If there are none, pass bias_mask=False.",
        UserWarning,
        stacklevel=2,
    )
