"""Ready-made answers to when a step perturbs, for ``sharpness_aware(when=...)``."""

from collections.abc import Callable

import chex
import jax.numpy as jnp

from sam_optax._hyperparameters import check_integer

When = Callable[[chex.Array], chex.Numeric]
"""A function of the training step (int32 scalar, from 0) that says whether it perturbs."""


def every(k: int) -> When:
    """Perturbs at steps 0, k, 2k, …: one in ``k`` costs a second gradient.

    Args:
      k: period, an integer ≥ 1.

    Returns:
      A function for ``sharpness_aware(..., when=...)``.

    Raises:
      ValueError: ``k`` < 1.

    Example:
      >>> import sam_optax
      >>> [bool(sam_optax.every(3)(step)) for step in range(5)]
      [True, False, False, True, False]
    """
    check_integer("k", k, lower=1)
    return lambda step: jnp.asarray(step) % k == 0


def after(n: int) -> When:
    """Perturbs from step ``n`` on: the first ``n`` steps are the base optimizer's.

    Args:
      n: number of steps, an integer ≥ 0.

    Returns:
      A function for ``sharpness_aware(..., when=...)``.

    Raises:
      ValueError: ``n`` < 0.

    Example:
      >>> import sam_optax
      >>> [bool(sam_optax.after(2)(step)) for step in range(4)]
      [False, False, True, True]
    """
    check_integer("n", n, lower=0)
    return lambda step: jnp.asarray(step) >= n
