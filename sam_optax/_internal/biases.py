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

# Whole names: Haiku and hand-written layers (b, b1), Haiku's and Keras' normalization layers.
_BIAS_NAME = re.compile(r"b(_?\d+)?|offset|beta")
# Part of a name between underscores: bias, bias_n, hn_bias, in_proj_bias, bias_ih_l0.
_BIAS_WORDS = {"bias", "biases"}
# Suffixes that containers add to a leaf's name: Flax NNX and penzai, haliax, penzai's arrays.
_BOX_NAMES = {"value", "raw_value", "array", "data_array"}


def _names(path: KeyPath) -> Iterator[str]:
    """The names along a path, last first, without indices; ``"a/b"`` and ``"a.b"`` are split."""
    for entry in reversed(path):
        for attribute in ("key", "name", "idx"):
            if hasattr(entry, attribute):
                entry = getattr(entry, attribute)
                break
        yield from (
            name for name in reversed(re.split(r"[./]", str(entry))) if name and not name.isdigit()
        )


def _is_bias(path: KeyPath) -> bool:
    names = list(_names(path))
    while len(names) > 1 and names[0] in _BOX_NAMES:
        names.pop(0)
    if not names:
        return False
    return bool(_BIAS_NAME.fullmatch(names[0])) or not _BIAS_WORDS.isdisjoint(names[0].split("_"))


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
    if bias_mask is not None:
        return expand_mask("bias_mask", bias_mask, params)
    return bias_leaves(params)


def warn_without_biases(params: Params, stack_axes: StackAxes) -> None:
    """Warns if no leaf is named like a bias although the tree looks like a network with biases.

    Such a tree has leaves with one axis and leaves with more; a bare vector has no layers. The
    warning is raised at a single line of code, so that Python's default filter shows it once.
    """
    found = [
        (path, np.ndim(layer_of(stack_axes, path, leaf)[1]))
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if trees.is_inexact(leaf)
    ]
    vectors = [path for path, ndim in found if ndim == 1]
    matrices = any(ndim > 1 for _, ndim in found)
    if not (vectors and matrices) or any(_is_bias(path) for path, _ in found):
        return
    shown = ", ".join(jax.tree_util.keystr(path) for path in vectors[:3])
    more = ", …" if len(vectors) > 3 else ""
    nameless = not any(list(_names(path)) for path, _ in found)
    why = (
        "the params have no names, as Keras' list of variables has none"
        if nameless
        else "no leaf of the params is called a bias"
    )
    warnings.warn(
        f"asam found no biases: {why}. Leaves with one axis ({shown}{more}) are normalized like "
        "weights. If some are biases, name them in bias_mask; sam_optax.bias_leaves(params) shows "
        "what is found. If there are none, pass bias_mask=False.",
        UserWarning,
        stacklevel=2,
    )
