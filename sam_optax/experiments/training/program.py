"""The compiled programs of one method: its first state, a stretch of an epoch, a look at a step."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sam_optax.experiments.training import step
from sam_optax.experiments.training.devices import Devices
from sam_optax.experiments.training.step import State
from sam_optax.experiments.training.task import Entry, Task


def over_seeds(f: Callable[..., Any], count: int) -> Callable[..., Any]:
    """``f`` for ``count`` seeds, an axis in front of every argument.

    Accelerators want the seeds batched. On a CPU batched matrix products gain nothing, and
    batched convolutions are two to four times as slow, so there the seeds take turns.
    """
    if count == 1:
        return lambda *args: jax.tree.map(
            lambda leaf: leaf[None], f(*jax.tree.map(lambda leaf: leaf[0], args))
        )
    if jax.default_backend() == "cpu":
        return lambda *args: jax.lax.map(lambda one: f(*one), args)
    return jax.vmap(f)


class Program:
    """What runs one method from some seeds at once.

    Args:
      task: what is trained on.
      entry: the method.
      count: number of seeds.
      place: the devices.
      looped: whether a stretch of steps is one program; else it is a call for each step.

    Attributes:
      compile_seconds: of the training steps.
    """

    def __init__(self, task: Task, entry: Entry, count: int, place: Devices, looped: bool) -> None:
        self._task, self._entry, self._count, self._place = task, entry, count, place
        self._looped = looped
        self._whole = None if place.count == 1 else place.whole
        self._step = step.train_step(task, entry)
        self._stretch: Any = None
        self._fed: Any = None
        self._look: Any = None
        self.compile_seconds = 0.0

    def init(self, method_keys: jax.Array, variables: Any) -> State:
        """The first states; the params are copies, so that they can be donated."""

        def one(key: jax.Array, variables: Any) -> State:
            return step.init(self._task, self._entry, key, variables)

        init = jax.jit(over_seeds(one, self._count), out_shardings=self._whole)
        return init(method_keys, jax.tree.map(jnp.copy, variables))

    def compile_stretch(self, *arguments: Any) -> None:
        """Compiles :meth:`stretch`, once."""
        if self._stretch is None:
            self._stretch = self._compiled(self._steps, 3, arguments)

    def compile_fed(self, *arguments: Any) -> None:
        """Compiles :meth:`fed`, once."""
        if self._fed is None:
            self._fed = self._compiled(self._fed_step, 3, arguments)

    def compile_look(self, *arguments: Any) -> None:
        """Compiles :meth:`look`, once."""
        if self._look is None:
            self._look = self._compiled(self._numbers, None, arguments)

    def _compiled(self, f: Callable[..., Any], state: int | None, arguments: Any) -> Any:
        """``f`` compiled for the devices; the argument ``state`` is overwritten."""
        begin = time.perf_counter()
        donated = () if state is None else (state,)
        jitted = jax.jit(f, donate_argnums=donated, out_shardings=self._whole)
        compiled = jitted.lower(*arguments).compile()
        if state is not None:
            self.compile_seconds = time.perf_counter() - begin
        return compiled

    def stretch(self, x: Any, start: Any, stop: Any, *per_seed: Any) -> tuple[State, jax.Array]:
        """Steps ``start`` to ``stop`` of an epoch, on examples that are on the devices.

        Args:
          x: all examples.
          start: first step.
          stop: the one after the last. Both are traced: one program serves every stretch.
          *per_seed: states, the method's keys, keys of the epoch, labels (n,) and the examples of
            every step of the epoch (steps, batch_size).

        Returns:
          The new states and the sums of the losses.
        """
        if self._looped:
            return self._stretch(x, start, stop, *per_seed)
        state, *rest = per_seed
        for i in range(start, stop):
            state, loss = self._stretch(x, np.int32(i), stop, state, *rest)
        return state, loss

    def fed(self, x: Any, y: Any, i: Any, *per_seed: Any) -> tuple[State, jax.Array]:
        """Step ``i`` of an epoch on a batch that was fed; one seed.

        Args:
          x: the batch's examples.
          y: its labels.
          i: number of the step.
          *per_seed: states, the method's keys, keys of the epoch.
        """
        return self._fed(x, y, i, *per_seed)

    def look(self, x: Any, *per_seed: Any) -> dict[str, jax.Array]:
        """A step in numbers; its arguments are those of :meth:`stretch`, with one step's examples.

        Empty if it has not been compiled.
        """
        return {} if self._look is None else self._look(x, *per_seed)

    def _data(self, x: Any, labels: Any) -> Any:
        return (x, labels) if self._entry.variant.method.needs_data else None

    def _steps(self, x: Any, start: Any, stop: Any, *per_seed: Any) -> Any:
        def one(state: State, key: Any, epoch_key: Any, labels: Any, indices: Any) -> Any:
            step_keys = jax.random.split(epoch_key, len(indices))

            def body(i: Any, carry: tuple[State, jax.Array]) -> tuple[State, jax.Array]:
                state, total = carry
                batch = x[indices[i]], labels[indices[i]]
                state, loss = self._step(key, state, batch, step_keys[i], self._data(x, labels))
                return state, total + loss

            if not self._looped:
                return body(start, (state, jnp.zeros(())))
            return jax.lax.fori_loop(start, stop, body, (state, jnp.zeros(())))

        return over_seeds(one, self._count)(*per_seed)

    def _fed_step(self, x: Any, y: Any, i: Any, *per_seed: Any) -> Any:
        def one(state: State, key: Any, epoch_key: Any) -> Any:
            return self._step(key, state, (x, y), jax.random.fold_in(epoch_key, i), None)

        return over_seeds(one, self._count)(*per_seed)

    def _numbers(self, x: Any, *per_seed: Any) -> dict[str, jax.Array]:
        numbers = step.look(self._task, self._entry)

        def one(state: State, key: Any, step_key: Any, labels: Any, index: Any) -> Any:
            batch = x[index], labels[index]
            return numbers(key, state, batch, step_key, self._data(x, labels))

        return over_seeds(one, self._count)(*per_seed)
