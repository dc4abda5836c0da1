"""The training: epochs of steps, an evaluation after each, checkpoints in between."""

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sam_optax.experiments.errors import UserError
from sam_optax.experiments.papers import feed
from sam_optax.experiments.papers.devices import Devices
from sam_optax.experiments.papers.metrics import Metrics
from sam_optax.experiments.papers.plan import Plan
from sam_optax.experiments.papers.progress import Progress
from sam_optax.experiments.papers.step import Problem, State, eval_step, train_step

_REPORT_EVERY = 20
"""Steps between looks at the clock; in between, steps are queued without waiting for them."""


class Cost(NamedTuple):
    """What the steps cost.

    Attributes:
      compile_seconds: of the training step.
      train_seconds: of the training steps of this process, evaluation and compilation left out.
      train_images: images in them.
      flops: floating point operations of a step on one device, as the compiler counts them;
        ``None`` where it does not say.
    """

    compile_seconds: float
    train_seconds: float
    train_images: int
    flops: float | None


class Training:
    """A training with its compiled steps.

    Args:
      problem: what is trained.
      plan: how much of it.
      devices: where.
      state: before the first step, on the devices; its memory is used up.
    """

    def __init__(self, problem: Problem, plan: Plan, devices: Devices, state: State) -> None:
        self._problem, self._plan, self._devices = problem, plan, devices
        self.state = state
        size, n = problem.dataset.size, plan.batch_size
        images = jax.ShapeDtypeStruct((n, size, size, 3), jnp.uint8, sharding=devices.split)
        labels = jax.ShapeDtypeStruct((n,), jnp.int32, sharding=devices.split)
        step = jax.jit(
            train_step(problem, plan.seed, plan.groups),
            donate_argnums=0,
            out_shardings=devices.whole,
        )
        start = time.perf_counter()
        self._step = step.lower(state, images, labels).compile()
        self._compile_seconds = time.perf_counter() - start
        self._evaluate = jax.jit(eval_step(problem), out_shardings=devices.whole)
        self._seconds, self._images = 0.0, 0

    @property
    def cost(self) -> Cost:
        """What it has cost so far."""
        analysis: Any = self._step.cost_analysis()
        flops = (analysis or {}).get("flops")
        return Cost(self._compile_seconds, self._seconds, self._images, flops)

    def run(
        self,
        first_epoch: int,
        metrics: Metrics,
        progress: Progress,
        after_epoch: Callable[[int], None],
    ) -> None:
        """Trains from an epoch (from 0) to the last one.

        Args:
          first_epoch: epochs that are done already.
          metrics: gets a point after each epoch.
          progress: is told how it goes.
          after_epoch: is called with the number of epochs that are done.

        Raises:
          UserError: a loss is no longer finite.
        """
        for epoch in range(first_epoch, self._plan.epochs):
            point = self._epoch(epoch, progress)
            progress.epoch(epoch + 1, point["train_loss"], point["test_accuracy"])
            for part in ("train", "test"):
                if not math.isfinite(loss := point[f"{part}_loss"]):
                    raise UserError(
                        f"The {part} loss is {loss} in epoch {epoch + 1}: the training has "
                        "diverged; give a smaller --lr or --rho, or --clip."
                    )
            metrics.add(point)
            after_epoch(epoch + 1)

    def _epoch(self, epoch: int, progress: Progress) -> dict[str, float]:
        plan = self._plan
        total: dict[str, Any] = {}
        start = last = time.perf_counter()
        waiting = 0
        for i, batch in enumerate(feed.training(plan, self._problem.dataset, self._devices, epoch)):
            self.state, found = self._step(self.state, batch.images, batch.labels)
            total = {k: total[k] + v for k, v in found.items()} if total else found
            waiting += 1
            if waiting == _REPORT_EVERY or i + 1 == plan.steps_per_epoch:
                jax.block_until_ready(total)
                now = time.perf_counter()
                progress.steps(epoch * plan.steps_per_epoch + i + 1, waiting, now - last)
                last, waiting = now, 0
        seconds = last - start
        images = plan.steps_per_epoch * plan.batch_size
        self._seconds += seconds
        self._images += images
        return {
            "epoch": epoch + 1,
            "step": (epoch + 1) * plan.steps_per_epoch,
            **{name: float(value) / plan.steps_per_epoch for name, value in total.items()},
            **self.test(),
            "seconds": seconds,
            "images_per_second": images / seconds,
        }

    def test(self) -> dict[str, float]:
        """Loss in nats and accuracy in [0, 1] on the test examples in use."""
        total: Any = None
        images, some = self._problem.dataset.test, self._plan.test
        for batch in feed.evaluation(images, some, self._plan.batch_size, self._devices):
            found = self._evaluate(self.state.params, self.state.batch_stats, *batch)
            total = found if total is None else jax.tree.map(jnp.add, total, found)
        return {
            "test_loss": float(total["loss"]) / len(some),
            "test_accuracy": float(total["correct"]) / len(some),
        }
