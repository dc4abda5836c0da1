"""Batches of images that stay on disk, decoded ahead in threads while the devices compute."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from sam_optax.experiments.data.dataset import Dataset
from sam_optax.experiments.data.images import Examples


def order(examples: int, batch_size: int, seed: int, epoch: int) -> np.ndarray:
    """The examples of each step of an epoch, int32, (steps, batch_size); what is left over is not.

    The same for examples in memory and on disk.
    """
    steps = examples // batch_size
    found = np.random.default_rng([seed, 1, epoch]).permutation(examples).astype(np.int32)
    return found[: steps * batch_size].reshape(steps, batch_size)


def train_batches(
    dataset: Dataset, batch_size: int, seed: int, epoch: int, start: int, rows: slice
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The batches of an epoch; the order and the random crops follow from seed and epoch alone.

    Args:
      dataset: its training examples stay on disk.
      batch_size: examples in a batch of all processes; what is left over stays unused.
      seed: of order and crops.
      epoch: from 0.
      start: the first step that is wanted; nothing before it is decoded.
      rows: this process's part of each batch.

    Yields:
      Images, uint8, (rows, size, size, 3), and their indices in the training set, int32, (rows,).
    """
    source: Any = dataset.train.x
    batches = order(len(source), batch_size, seed, epoch)[start:, rows]

    def example(i: np.int32) -> tuple[np.ndarray, np.int32]:
        return source.image(int(i), np.random.default_rng([seed, 3, epoch, int(i)])), i

    return _ahead(batches, example)


def test_batches(
    examples: Examples, batch_size: int, rows: slice
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """All examples in batches of one size, the last one filled up.

    Args:
      examples: images that stay on disk.
      batch_size: examples in a batch of all processes.
      rows: this process's part of each batch.

    Yields:
      Images, uint8, (rows, size, size, 3), labels, int32, and weights, float32: 1 for an example
      and 0 for filling.
    """
    source: Any = examples.x
    n = len(source)
    batches = np.arange(-(-n // batch_size) * batch_size).reshape(-1, batch_size)[:, rows]

    def example(position: int) -> tuple[np.ndarray, np.int32, np.float32]:
        i = min(int(position), n - 1)
        return source.image(i, None), np.int32(examples.y[i]), np.float32(position < n)

    return _ahead(batches, example)


def _ahead(batches: np.ndarray, example: Callable[[Any], tuple[Any, ...]]) -> Iterator[Any]:
    """Batches of what ``example`` makes of each index."""
    import grain

    threads = os.cpu_count() or 1
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * batches.shape[1])
    examples = grain.MapDataset.source(batches.ravel()).map(example).to_iter_dataset(options)
    return iter(examples.batch(batches.shape[1], drop_remainder=True))
