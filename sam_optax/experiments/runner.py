"""One method on its way, all seeds at once: compiled epochs, timed."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sam_optax.experiments import evaluation, methods
from sam_optax.experiments.methods import Step, Variant
from sam_optax.experiments.task import Task, batch_indices, keys


def over_seeds(f: Callable[..., Any]) -> Callable[..., Any]:
    """``f`` for all seeds at once, an axis in front of every argument.

    Accelerators want the seeds batched. On a CPU batched matrix products gain nothing, and
    batched convolutions are two to four times as slow, so there the seeds take turns.
    """
    if jax.default_backend() == "cpu":
        return lambda *args: jax.lax.map(lambda one: f(*one), args)
    return jax.vmap(f)


class Runner:
    """One method on its way: its params and optimizer states, one of each a seed."""

    def __init__(self, task: Task, name: str, variant: Variant, initial: Any) -> None:
        self.name = name
        self.params = initial
        self.state: Any = None
        self.seconds: list[float] = []
        self._look_compiled: Any = None
        self._task = task
        self._variant = variant
        self._keys = keys(task, 1)
        self._base = methods.base_optimizer(**task.base, steps=task.epochs * task.steps_per_epoch)

    def _epoch(
        self,
        x: Any,
        params: Any,
        state: Any,
        key: Any,
        epoch_key: Any,
        labels: Any,
        indices: Any,
    ) -> tuple[Any, Any]:
        """One seed's steps of an epoch."""
        tx = self._variant.transformation(self._base, key)

        def step(carry: tuple[Any, Any], this: Any) -> tuple[tuple[Any, Any], None]:
            params, state = carry
            index, step_key = this
            step = self._step(x, params, labels, index, step_key)
            return self._variant.update(tx, state, step), None

        step_keys = jax.random.split(epoch_key, len(indices))
        return jax.lax.scan(step, (params, state), (indices, step_keys))[0]

    def _look(
        self, x: Any, params: Any, state: Any, key: Any, step_key: Any, labels: Any, index: Any
    ) -> dict[str, Any]:
        """One seed's step in numbers; a rise of the loss that is not known is NaN."""
        step = self._step(x, params, labels, index, step_key)
        seen = self._variant.look(self._base, key, state, step)
        if seen is None:
            return {}
        numbers = seen._asdict()
        known = numbers.pop("loss_known")
        return {**numbers, "loss_rise": jnp.where(known, seen.loss_rise, jnp.nan)}

    def _step(self, x: Any, params: Any, labels: Any, index: Any, key: Any) -> Step:
        def losses_fn(params: Any, batch: Any) -> jax.Array:
            return evaluation.losses(self._task.model, params, *batch)

        return Step(losses_fn, params, (x[index], labels[index]), key, (x, labels))

    def compile(self, x: Any, labels: Any, watch: bool = False) -> None:
        """Compiles an epoch of all seeds, and with ``watch`` a look at a step."""
        self.state = jax.jit(
            over_seeds(lambda k, p: self._variant.transformation(self._base, k).init(p))
        )(self._keys, self.params)

        def epoch(x: Any, *per_seed: Any) -> tuple[Any, Any]:
            return over_seeds(lambda *one: self._epoch(x, *one))(*per_seed)

        arguments = self.params, self.state, self._keys, keys(self._task, 2), labels
        lowered = jax.jit(epoch).lower(x, *arguments, batch_indices(self._task, 0))
        self._compiled = lowered.compile()
        if watch:

            def look(x: Any, *per_seed: Any) -> dict[str, Any]:
                return over_seeds(lambda *one: self._look(x, *one))(*per_seed)

            batch = batch_indices(self._task, 0)[:, 0]
            self._look_compiled = jax.jit(look).lower(x, *arguments, batch).compile()

    def run_epoch(self, x: Any, labels: Any, epoch_keys: jax.Array, indices: np.ndarray) -> None:
        """Trains all seeds for an epoch and takes the time."""
        start = time.perf_counter()
        self.params, self.state = jax.block_until_ready(
            self._compiled(x, self.params, self.state, self._keys, epoch_keys, labels, indices)
        )
        self.seconds.append(time.perf_counter() - start)

    def look(self, x: Any, labels: Any, epoch_keys: jax.Array, indices: np.ndarray) -> Any:
        """A step on the epoch's first batch in numbers, by name; empty if it is not watched."""
        if self._look_compiled is None:
            return {}
        arguments = self.params, self.state, self._keys, epoch_keys, labels
        return self._look_compiled(x, *arguments, indices[:, 0])
