"""The order of examples, and batches of images on disk, decoded while devices compute."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from sam_optax.experiments.data.dataset import Dataset
from sam_optax.experiments.data.images import Examples


def order(examples: int, batch_size: int, seed: int, epoch: int) -> np.ndarray:
    """Indices of the examples per step of an epoch, int32, (steps, batch_size); drops the rest.

    The order is the same for examples in memory and on disk.
    """
    steps = examples // batch_size
    found = np.random.default_rng([seed, 1, epoch]).permutation(examples).astype(np.int32)
    return found[: steps * batch_size].reshape(steps, batch_size)


def train_batches(
    dataset: Dataset, batch_size: int, seed: int, epoch: int, rows: slice
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields an epoch of this process's ``rows`` of each batch, with random crops.

    Images are uint8, (rows, size, size, 3), with their indices, int32, (rows,). Crops depend on
    seed and epoch.
    """
    source: Any = dataset.train.x

    def example(i: np.int32) -> tuple[np.ndarray, np.int32]:
        return source.image(int(i), np.random.default_rng([seed, 3, epoch, int(i)])), i

    return _ahead(order(len(source), batch_size, seed, epoch)[:, rows], example)


def test_batches(
    examples: Examples, batch_size: int, rows: slice
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields this process's ``rows`` of batches of all examples: images, labels, and weights.

    The last batch is padded with examples of weight 0; the others have weight 1.
    """
    source: Any = examples.x
    n = len(source)
    batches = np.arange(-(-n // batch_size) * batch_size).reshape(-1, batch_size)[:, rows]

    def example(position: int) -> tuple[np.ndarray, np.int32, np.float32]:
        i = min(int(position), n - 1)
        return source.image(i, None), np.int32(examples.y[i]), np.float32(position < n)

    return _ahead(batches, example)


def _ahead(batches: np.ndarray, example: Callable[[Any], tuple[Any, ...]]) -> Iterator[Any]:
    """Batches of ``example(index)``."""
    import grain

    threads = os.cpu_count() or 1
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * batches.shape[1])
    examples = grain.MapDataset.source(batches.ravel()).map(example).to_iter_dataset(options)
    return iter(examples.batch(batches.shape[1], drop_remainder=True))
