"""Loss, scores and sharpness of the networks of a run, compiled once for all methods."""

import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sam_optax
from sam_optax.experiments.training import feed, measures
from sam_optax.experiments.training.devices import Devices, over_seeds
from sam_optax.experiments.training.measures import BLOCK, Blocks
from sam_optax.experiments.training.task import Task, noisy_labels
from sam_optax.experiments.types import Function, PyTree


class Evaluation:
    """Measures the networks of ``count`` seeds at once, one block of examples after the other."""

    def __init__(self, task: Task, count: int, place: Devices) -> None:
        self._task, self._place = task, place
        x, self._examples = measures.measured(task.dataset.train)
        self._train = self._blocks(x, np.zeros_like(task.dataset.train.y[: len(x)]))
        self._test: list[Blocks] | None = None
        test = task.dataset.test
        if isinstance(test.x, np.ndarray):
            self._test = self._blocks(test.x, test.y)
        sam = sam_optax.sam(task.sharpness_rho)

        def gradient(variables: PyTree, block: Blocks) -> PyTree:
            def loss(params: optax.Params) -> jax.Array:
                return measures.total_loss(task, {**variables, "params": params}, block)

            return jax.value_and_grad(loss)(variables["params"])

        def perturbed(variables: PyTree, grads: optax.Updates) -> PyTree:
            params = variables["params"]
            moved, _ = sam.perturb_fn(params, grads, sam.init(params))
            return {**variables, "params": moved}

        def program(f: Function) -> Function:
            """``f(variables, block)`` of all seeds, which may have different labels."""

            def of_block(variables: PyTree, block: Blocks) -> PyTree:
                y = jnp.broadcast_to(block.y, (count, *block.y.shape[-task.dataset.train.y.ndim :]))
                one = over_seeds(lambda v, y: f(v, block._replace(y=y)), count)
                return one(variables, y)

            return jax.jit(of_block)

        self._loss = program(functools.partial(measures.total_loss, task))
        self._scores = program(functools.partial(measures.scores, task))
        self._gradient = program(gradient)
        self._perturbed = jax.jit(over_seeds(perturbed, count))
        self._add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b))

    def _blocks(self, x: np.ndarray, y: np.ndarray) -> list[Blocks]:
        """Blocks of examples, each shared by the devices."""
        index, weight = measures.in_blocks(len(y), self._place.count)
        each = zip(index, weight, strict=True)
        return [self._place.put(Blocks(x[i], y[i], weight), 0) for i, weight in each]

    @functools.cache  # noqa: B019 (an evaluation lives as long as the run)
    def _labelled(self, seeds: tuple[int, ...]) -> list[Blocks]:
        """The measured training examples, with the labels that each seed trains on."""
        return self._with(noisy_labels(self._task, seeds)[:, self._examples], self._train)

    @functools.cache  # noqa: B019
    def _held_out(self, seeds: tuple[int, ...]) -> list[Blocks]:
        """The held-out examples, with each seed's labels."""
        return self._with(noisy_labels(self._task, seeds, held_out=True), self._test or [])

    def _with(self, labels: np.ndarray, blocks: list[Blocks]) -> list[Blocks]:
        """Blocks of examples with labels (seeds, examples)."""
        index, _ = measures.in_blocks(labels.shape[1], self._place.count)
        pairs = zip(blocks, index, strict=True)
        return [block._replace(y=self._place.put(labels[:, i], 1)) for block, i in pairs]

    def _tested(self, seeds: tuple[int, ...]) -> Iterable[Blocks]:
        if self._task.held_out:
            return self._held_out(seeds)
        if self._test is not None:
            return self._test
        size = BLOCK * self._place.count
        batches = feed.test_batches(self._task.dataset.test, size, self._place.rows(size))
        return (Blocks(*self._place.put_rows(batch)) for batch in batches)

    def _total(self, f: Function, variables: PyTree, blocks: Iterable[Blocks]) -> PyTree:
        return functools.reduce(self._add, (f(variables, block) for block in blocks))

    def after_epoch(self, variables: PyTree, seeds: tuple[int, ...]) -> dict[str, np.ndarray]:
        """Mean training loss and mean scores of the test examples, one of each for each seed."""
        train, test = len(self._examples), len(self._task.dataset.test.y)
        loss = self._total(self._loss, variables, self._labelled(seeds))
        scores = self._total(self._scores, variables, self._tested(seeds))
        loss, scores = jax.device_get((loss, scores))
        means = {name: total / np.float32(test) for name, total in scores.items()}
        return {"train_loss": loss / np.float32(train), **means}

    def sharpness(self, variables: PyTree, seeds: tuple[int, ...]) -> np.ndarray:
        """L(w + ε) − L(w) in nats per seed, with SAM's ε for the full gradient.

        One gradient step of length ρ gives a lower bound of the largest rise within ρ. It sees
        nothing at a point where the gradient is zero.
        """
        blocks = self._labelled(seeds)
        loss, grads = self._total(self._gradient, variables, blocks)
        above = self._total(self._loss, self._perturbed(variables, grads), blocks)
        loss, above = jax.device_get((loss, above))
        n = np.float32(len(self._examples))
        return above / n - loss / n
