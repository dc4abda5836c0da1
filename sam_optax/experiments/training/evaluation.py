"""Loss, scores and sharpness of the networks of a run, compiled once for all methods."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sam_optax
from sam_optax.experiments.training import feed, measures
from sam_optax.experiments.training.devices import over_seeds
from sam_optax.experiments.training.measures import Blocks
from sam_optax.experiments.training.task import noisy_labels
from sam_optax.experiments.types import Function, PyTree


class Evaluation:
    """Measures networks, given the variables of each group of seeds, block by block."""

    def __init__(self, source: feed.Source) -> None:
        self._source, task = source, source.task
        x, examples = measures.measured(task.dataset.train)
        self._examples = np.float32(len(examples))
        labels = [noisy_labels(task, seeds)[:, examples] for seeds in source.groups]
        self._train: Any = self._blocks(x, labels)
        labels = [noisy_labels(task, seeds, held_out=True) for seeds in source.groups]
        x = task.dataset.test.x
        self._test: Any = self._blocks(x, labels) if isinstance(x, np.ndarray) else None
        sam = sam_optax.sam(task.sharpness_rho)

        def gradient(variables: PyTree, block: Blocks) -> PyTree:
            def loss(params: optax.Params) -> jax.Array:
                return measures.total_loss(task, {**variables, "params": params}, block)

            return jax.value_and_grad(loss)(variables["params"])

        def perturbed(variables: PyTree, grads: optax.Updates) -> PyTree:
            params = variables["params"]
            moved, _ = sam.perturb_fn(params, grads, sam.init(params))
            return {**variables, "params": moved}

        self._loss = self._program(functools.partial(measures.total_loss, task))
        self._score = self._program(functools.partial(measures.total_score, task))
        self._gradient = self._program(gradient)
        self._perturbed = jax.jit(over_seeds(perturbed, source.count))
        self._add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b))

    def after_epoch(self, variables: Sequence[PyTree]) -> dict[str, np.ndarray]:
        """Mean training loss and mean score of the test examples, (seeds,) each."""
        found, task = [], self._source.task
        tested = np.float32(len(task.dataset.test.y))
        for group, of in enumerate(variables):
            blocks = self._test[group] if self._test else self._from_disk()
            loss = self._total(self._loss, of, self._train[group])
            loss, score = jax.device_get((loss, self._total(self._score, of, blocks)))
            found.append({"train_loss": loss / self._examples, task.metric.key: score / tested})
        return {name: np.concatenate([of[name] for of in found]) for name in found[0]}

    def sharpness(self, variables: Sequence[PyTree]) -> np.ndarray:
        """L(w + ε) − L(w) in nats, (seeds,), with SAM's ε for the full gradient.

        One gradient step of length ρ gives a lower bound of the largest rise within ρ. It sees
        nothing at a point where the gradient is zero.
        """
        found, n = [], self._examples
        for of, blocks in zip(variables, self._train, strict=True):
            loss, grads = self._total(self._gradient, of, blocks)
            above = self._total(self._loss, self._perturbed(of, grads), blocks)
            loss, above = jax.device_get((loss, above))
            found.append(above / n - loss / n)
        return np.concatenate(found)

    def _blocks(self, x: np.ndarray, labels: Sequence[np.ndarray]) -> list[list[Blocks]]:
        """Blocks of examples with the labels of each group; devices share each block."""
        put = self._source.put
        index, weight = measures.in_blocks(len(x), self._source.mesh.size)
        shared = [put((x[i], w), 0) for i, w in zip(index, weight, strict=True)]
        pairs = list(zip(shared, index, strict=True))
        return [[Blocks(x, put(y[:, i], 1), weight) for (x, weight), i in pairs] for y in labels]

    def _from_disk(self) -> Iterator[Blocks]:
        """The test examples for one seed."""
        (x, y), put = self._source.task.dataset.test, self._source.put
        index, weight = measures.in_blocks(len(y), self._source.mesh.size)
        for images, i, w in zip(feed.images(x, index), index, weight, strict=True):
            yield Blocks(put(images, 0), put(y[None, i], 1), put(w, 0))

    def _program(self, f: Function) -> Function:
        """``f(variables, block)`` of all seeds of a group, each with its own labels."""

        def of_block(variables: PyTree, block: Blocks) -> PyTree:
            one = over_seeds(lambda v, y: f(v, block._replace(y=y)), self._source.count)
            return one(variables, block.y)

        return jax.jit(of_block)

    def _total(self, f: Function, variables: PyTree, blocks: Iterable[Blocks]) -> PyTree:
        return functools.reduce(self._add, (f(variables, block) for block in blocks))
