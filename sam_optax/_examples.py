"""Gradient functions that treat the examples of a batch differently."""

from collections.abc import Callable
from typing import Any, TypeAlias

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from sam_optax import _hyperparameters as hp
from sam_optax import _noise, _trees

LossesFn: TypeAlias = Callable[[optax.Params, Any], chex.Array]
"""``(params, batch) -> losses``, one for each example, of shape (batch,)."""


def part_of_batch(batch: Any, fraction: float) -> Any:
    """Evenly spaced examples of a batch, for an ascent gradient at a fraction of the price.

    ``update(None, state, params, grad_fn=grad_fn, ascent_grad_fn=lambda p: jax.grad(loss)(p,
    part_of_batch(batch, 0.1)))`` makes a step of about 1.1 gradients: the ascent needs a direction
    only, and the noise of a small batch is no disadvantage there (it is what m-sharpness and F-SAM
    seek). Examples are spaced evenly, so that each device keeps its share of a sharded batch.

    Args:
      batch: a pytree of arrays, all with the examples along their first axis.
      fraction: share of the examples, in (0, 1].

    Returns:
      The same pytree with ``max(1, round(fraction * n))`` of the n examples.

    Raises:
      ValueError: ``fraction`` out of range, or the leaves differ in their number of examples.

    Example:
      >>> import jax.numpy as jnp, sam_optax
      >>> print(sam_optax.part_of_batch(jnp.arange(10), 0.2))
      [0 5]
    """
    _check_fraction(fraction)
    n = _batch_size(batch)
    kept = max(1, round(float(fraction) * n))
    if n % kept == 0:
        return jax.tree.map(lambda leaf: leaf[:: n // kept], batch)
    index = np.arange(kept) * n // kept
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[index], batch)


def rising_samples(
    losses_fn: LossesFn, params: optax.Params, batch: Any, fraction: float = 0.5
) -> Callable[[optax.Params], optax.Updates]:
    r"""ESAM's selection: the sharp gradient on the examples whose loss rises most.

    .. math::
        \frac{1}{|B^+|} \sum_{i \in B^+} \nabla \ell_i(w + \varepsilon), \qquad
        B^+ = \text{the } \lceil \gamma |B| \rfloor \text{ largest }
        \ell_i(w + \varepsilon) - \ell_i(w).

    The sharp pass costs a forward pass over the batch and a gradient on part of it. The ascent
    gradient is that of the whole batch: give it as ``grads``, or as ``ascent_grad_fn``, since at
    w itself no loss has risen. The first half of ESAM is :func:`random_mask`.

    Args:
      losses_fn: ``(params, batch) -> losses``, of shape (batch,).
      params: w, where the losses are compared to.
      batch: a pytree of arrays, all with the examples along their first axis.
      fraction: γ in (0, 1], the share of the examples. Default .5, the paper's.

    Returns:
      ``params -> grads``, for ``update(..., grad_fn=...)``.

    Raises:
      ValueError: ``fraction`` out of range, or the leaves differ in their number of examples.

    Example:
      >>> import jax, jax.numpy as jnp, sam_optax
      >>> losses_fn = lambda w, x: 0.5 * x * w**2
      >>> grad_fn = sam_optax.rising_samples(losses_fn, jnp.array(1.0), jnp.array([1.0, 3.0]))
      >>> print(grad_fn(jnp.array(2.0)))  # the loss of the second example rises most
      6.0

    References:
      Du et al., `Efficient Sharpness-Aware Minimization for Improved Training of Neural Networks
      <https://arxiv.org/abs/2110.03141>`_, 2022.
    """
    _check_fraction(fraction)
    n = _batch_size(batch)
    kept = max(1, round(float(fraction) * n))
    before = _losses(losses_fn, params, batch, n)

    def grad_fn(point: optax.Params) -> optax.Updates:
        rises = jax.lax.stop_gradient(_losses(losses_fn, point, batch, n) - before)
        _, index = jax.lax.top_k(rises, kept)
        risen = jax.tree.map(lambda leaf: jnp.asarray(leaf)[index], batch)
        return _gradient(lambda p: jnp.mean(losses_fn(p, risen)), point)

    return grad_fn


def reweighted_ascent(
    losses_fn: LossesFn, batch: Any, *, key: chex.PRNGKey, power: float = 1.0
) -> Callable[[optax.Params], optax.Updates]:
    r"""δ-SAM's ascent gradient: one that comes closer to a perturbation of each example's own.

    .. math::
        \sum_i \omega_i\, \nabla \ell_i(w), \qquad
        \omega_i \propto |\langle \nabla \ell_i(w), u \rangle|^k, \qquad u \sim N(0, I).

    A perturbation of its own would raise the loss of example i by ρ‖∇ℓ_i‖. The common ε whose rises
    ⟨∇ℓ_i, ε⟩ come closest to these in the sum of squares starts out along Σ ‖∇ℓ_i‖ ∇ℓ_i: examples
    weigh as their gradient is long. The lengths are estimated by the derivative along one random
    direction, ``|⟨∇ℓ_i, u⟩|``, whose expectation is proportional to ‖∇ℓ_i‖, at the price of a
    forward pass.

    Built from the published description of δ-SAM, whose weights may differ from these in detail.

    Args:
      losses_fn: ``(params, batch) -> losses``, of shape (batch,).
      batch: what it takes as second argument.
      key: a JAX PRNG key, typed or raw, another one for each step.
      power: k. Default 1, as derived above; 0 is the plain gradient.

    Returns:
      ``params -> grads``, for ``update(..., ascent_grad_fn=...)``.

    Raises:
      TypeError: ``key`` is not a single PRNG key.
      ValueError: ``power`` < 0; (from ``grad_fn``) there is not one loss for each example.

    Example:
      >>> import jax, jax.numpy as jnp, sam_optax
      >>> grad_fn = sam_optax.reweighted_ascent(
      ...     lambda w, x: x * w, jnp.array([1.0, 3.0]), key=jax.random.key(0))
      >>> print(grad_fn(jnp.array(1.0)))  # (1 · 1 + 3 · 3) / (1 + 3)
      2.5

    References:
      Zhou et al., `Sharpness-Aware Minimization with Dynamic Reweighting
      <https://arxiv.org/abs/2112.08772>`_, 2022.
    """
    hp.check("power", power, lower=0, schedule=False)
    _noise.check_key(key)

    def grad_fn(params: optax.Params) -> optax.Updates:
        words = _noise.first_key(key)
        noise = _noise.normal_tree(words, params, 1.0)
        direction = _trees.map_inexact(lambda p, z: _trees.cast_like(z, p), params, noise)
        inexact, rest = _split(params)

        def losses(leaves: list[Any]) -> chex.Array:
            return losses_fn(_join(leaves, rest, params), batch)

        _, slopes = jax.jvp(losses, (inexact,), (_split(direction)[0],))
        if jnp.ndim(slopes) != 1:
            raise ValueError(
                "losses_fn must return one loss for each example, shape (batch,), got shape "
                f"{jnp.shape(slopes)}: leave the mean out."
            )
        weights = jnp.abs(_trees.widen(slopes)) ** power
        total = jnp.sum(weights)
        even = jnp.full_like(weights, 1 / weights.size)
        weights = jnp.where(total > 0, weights / jnp.where(total > 0, total, 1), even)
        weights = jax.lax.stop_gradient(weights).astype(slopes.dtype)
        return _gradient(lambda p: jnp.sum(weights * losses_fn(p, batch)), params)

    return grad_fn


def _gradient(loss: Callable[[optax.Params], chex.Array], params: optax.Params) -> optax.Updates:
    """The gradient as optax wants it, which for complex params is the conjugate of JAX's."""
    return jax.tree.map(lambda g: jnp.conj(g) if jnp.iscomplexobj(g) else g, jax.grad(loss)(params))


def _split(tree: Any) -> tuple[list[Any], list[Any]]:
    leaves = jax.tree.leaves(tree)
    return [x for x in leaves if _trees.is_inexact(x)], leaves


def _join(inexact: list[Any], leaves: list[Any], like: Any) -> Any:
    moved = iter(inexact)
    merged = [next(moved) if _trees.is_inexact(x) else x for x in leaves]
    return jax.tree.unflatten(jax.tree.structure(like), merged)


def _check_fraction(fraction: float) -> None:
    interval = {"lower": 0, "upper": 1, "lower_allowed": False, "upper_allowed": True}
    hp.check_number("fraction", fraction, **interval)


def _batch_size(batch: Any) -> int:
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(batch)]
    sizes = {shape[0] if shape else 0 for shape in shapes}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(
            "batch must be a pytree of arrays with the same number of examples, at least one, "
            f"along their first axis, got shapes {shapes}."
        )
    return int(sizes.pop())


def _losses(losses_fn: LossesFn, params: optax.Params, batch: Any, n: int) -> chex.Array:
    losses = losses_fn(params, batch)
    if jnp.shape(losses) != (n,):
        raise ValueError(
            f"losses_fn must return one loss for each of the {n} examples, shape ({n},), got shape "
            f"{jnp.shape(losses)}: leave the mean out."
        )
    return losses
