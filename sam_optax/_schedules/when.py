"""Which steps perturb: functions of the training step for ``sharpness_aware(when=...)``."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from chex import Array, Numeric
from typing_extensions import TypeAliasType

from sam_optax._internal import generator, noise
from sam_optax._internal import hyperparameters as hp
from sam_optax._internal.hyperparameters import check_integer
from sam_optax._internal.types import PyTree


class RandomWhen(NamedTuple):
    """A ``when`` with a state, as :func:`sam_optax.bernoulli` returns it.

    Attributes:
      init: ``() -> state``, which the optimizer keeps unchanged as ``when_state``.
      decide: ``(training_step, state) -> bool``.
    """

    init: Callable[[], PyTree]
    decide: Callable[[Array, PyTree], Numeric]


class GradNormWhen(NamedTuple):
    """A ``when`` that depends on the gradient norm, as :func:`sam_optax.above_average` returns it.

    Attributes:
      init: ``() -> state``, which the optimizer keeps as ``when_state``.
      decide: ``(training_step, state, squared_norm) -> (bool, state)``, with ‖g‖² at the params.
    """

    init: Callable[[], PyTree]
    decide: Callable[[Array, PyTree, jax.Array], tuple[Numeric, PyTree]]


When = TypeAliasType("When", Callable[[Array], Numeric] | RandomWhen | GradNormWhen)
"""A function of the training step (int32 scalar, from 0) that returns whether it perturbs."""


_WITH_STATE = (RandomWhen, GradNormWhen)


def check_when(when: object) -> None:
    """Raises unless ``when`` is a :data:`When` or ``None``."""
    if when is not None and not callable(when) and not isinstance(when, _WITH_STATE):
        raise TypeError(
            f"when must be a function of the step, such as sam_optax.every(2), got {when!r}."
        )


def init_when(when: When | None) -> PyTree:
    """The state of a ``when``."""
    return when.init() if isinstance(when, _WITH_STATE) else optax.EmptyState()


def decide(
    when: When | None, training_step: Array, state: PyTree, square: Callable[[], jax.Array]
) -> tuple[Numeric, PyTree]:
    """Whether a training step perturbs, and the new state; ``square`` returns ‖g‖²."""
    if isinstance(when, GradNormWhen):
        return when.decide(training_step, state, square())
    return decide_before(when, training_step, state), state


def decide_before(when: When | None, training_step: Array, state: PyTree) -> Numeric:
    """The same of a ``when`` that does not see the gradient."""
    if when is None:
        return True
    if isinstance(when, RandomWhen):
        return when.decide(training_step, state)
    assert not isinstance(when, GradNormWhen)
    perturbs = when(training_step)
    if perturbs is None or callable(perturbs) or np.ndim(perturbs):
        raise TypeError(
            f"when must return whether the step perturbs, a boolean scalar, got {perturbs!r}."
        )
    return perturbs


def every(k: int) -> When:
    """Perturbs at every k-th step (0, k, 2k, …): one step in k costs a second gradient.

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
    """Perturbs from step ``n`` on; in the first ``n`` steps only the base optimizer runs.

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


def bernoulli(p: hp.Hyperparameter, *, key: noise.Key) -> RandomWhen:
    """SS-SAM: perturbs at random, each step with probability ``p``.

    The decision depends on the key in the optimizer's state (``when_state``) and on the training
    step only, so a resumed run continues exactly, and all devices agree.

    Args:
      p: probability that a step perturbs, 0 ≤ p ≤ 1, or an optax schedule of it, as in the paper.
        A step costs 1 + p gradients on average.
      key: a JAX PRNG key, typed or raw, or an integer seed.

    Returns:
      A value for ``sharpness_aware(..., when=...)`` and ``alternating(..., when=...)``.

    Raises:
      TypeError: ``key`` is neither a seed nor a single PRNG key.
      ValueError: ``p`` outside [0, 1].

    Example:
      >>> import jax, optax, sam_optax
      >>> tx = sam_optax.sharpness_aware(
      ...     optax.sgd(0.1), sam_optax.sam(), when=sam_optax.bernoulli(0.5, key=jax.random.key(0)))

    References:
      Zhao et al., `SS-SAM: Stochastic Scheduled Sharpness-Aware Minimization for Efficiently
      Training Deep Neural Networks <https://arxiv.org/abs/2203.09962>`_, 2022.
    """
    hp.check("p", p, lower=0, upper=1, upper_allowed=True)
    noise.check_key(key)

    def decide(training_step: Array, state: Array) -> Numeric:
        uniform = generator.uniform(noise.fold_in(state, training_step)[0])
        return uniform < jnp.asarray(hp.evaluate(p, training_step)).astype(uniform.dtype)

    return RandomWhen(lambda: noise.first_key(key), decide)
