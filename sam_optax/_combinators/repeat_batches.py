"""Repeats each batch for the calls that its step with :func:`sam_optax.alternating` takes."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from chex import Numeric
from optax import OptState

from sam_optax._combinators.eval_params import alternating_states
from sam_optax._internal.hyperparameters import check_integer

Batch = TypeVar("Batch")


def repeat_batches(
    batches: Iterable[Batch], state_fn: Callable[[], OptState], *, microbatches: int = 1
) -> Iterator[Batch]:
    """Yields each batch once per call that its training step with :func:`alternating` takes.

    The loop itself does not change: it calls ``update`` once per batch that it receives. The counts
    are read from the state after every call, which waits for that call to finish. A loop that
    prefetches batches cannot use this function: repeat each batch twice there, and the very first
    one three times with a random start.

    Args:
      batches: the batches, one per training step.
      state_fn: returns the current optimizer state of the loop, such as ``lambda: state``,
        ``lambda: train_state.opt_state`` or, for NNX, ``lambda: optimizer.opt_state``.
      microbatches: the k of ``optax.MultiSteps(alternating(...), k)``: k consecutive batches then
        make one step and are repeated together, without a rest at the end. Default 1: no wrapper.

    Returns:
      An iterator over the batches with their repetitions.

    Raises:
      TypeError: ``state_fn`` is not a function.
      ValueError: ``microbatches`` < 1; (from the iterator) the state has no ``alternating``, was
        not updated by the last call, or holds several in different phases.

    Example:
      >>> import jax, jax.numpy as jnp, optax, sam_optax
      >>> tx = sam_optax.alternating(
      ...     optax.sgd(0.1), sam_optax.sam(rho=0.1), when=sam_optax.every(2))
      >>> params = jnp.array([3.0, 4.0])
      >>> state, seen = tx.init(params), []
      >>> for x in sam_optax.repeat_batches([1.0, 2.0, 3.0], lambda: state):
      ...     grads = jax.grad(lambda w: x * jnp.sum(w**2))(params)
      ...     updates, state = tx.update(grads, state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     seen.append(x)
      >>> seen
      [1.0, 1.0, 2.0, 3.0, 3.0]
    """
    if not callable(state_fn):
        raise TypeError(
            "state_fn must be a function that returns the current optimizer state, such as "
            f"lambda: state, got {type(state_fn).__name__}."
        )
    check_integer("microbatches", microbatches, lower=1)
    return _repeat(iter(batches), state_fn, int(microbatches))


def _repeat(
    batches: Iterator[Batch], state_fn: Callable[[], OptState], microbatches: int
) -> Iterator[Batch]:
    while len(step := list(itertools.islice(batches, microbatches))) == microbatches:
        before = _progress(state_fn())
        yield from step
        now = _progress(state_fn(), before)
        # A wrapper such as optax.apply_if_finite may drop a call without changing the state: go on
        # with the next batch.
        while now.step == before.step and now.phase != before.phase:
            before = now
            yield from step
            now = _progress(state_fn(), before)


class _Progress(NamedTuple):
    """Steps taken or skipped, ``AlternatingState.phase``, and the array that it was read from."""

    step: int
    phase: int
    buffer: Any


def _progress(state: OptState, before: _Progress | None = None) -> _Progress:
    states = alternating_states(state)
    found = {(_value(s.step) + _value(s.skipped), _value(s.phase)) for s in states}
    if len(found) > 1:
        raise ValueError(
            "repeat_batches needs all states of alternating(...) in one optimizer to take the "
            "same calls, but they are in different phases: give every one the same when, and "
            f"perturbations of one kind. Got (step, phase) = {sorted(found)}."
        )
    (buffer,) = jax.tree.leaves(states[0].phase)
    if before is not None and buffer is before.buffer:
        raise ValueError(
            "state_fn returned the state from before the last call: it must return the current "
            "optimizer state, as lambda: state does in a loop that rebinds state, and the loop "
            "must call update once for each batch."
        )
    return _Progress(*found.pop(), buffer)


def _value(scalar: Numeric) -> int:
    """The value of a scalar, which may be held in a Variable or replicated over devices."""
    (leaf,) = jax.tree.leaves(scalar)
    values = np.unique(np.asarray(leaf))
    if values.size != 1:
        raise ValueError(
            f"repeat_batches needs one run, and the runs in this state differ: {values.tolist()}."
        )
    return int(values[0])
