"""Batches on their way to the devices, loaded while the previous ones are computed on."""

import concurrent.futures
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np

from sam_optax.experiments.papers.devices import Devices
from sam_optax.experiments.papers.images import ImageDataset, Images
from sam_optax.experiments.papers.plan import Plan

_AHEAD = 2


class Batch(NamedTuple):
    """A batch on the devices.

    Attributes:
      images: uint8, (examples, size, size, 3).
      labels: int32, (examples,).
      weight: float32, (examples,): 1, or 0 for filling.
    """

    images: jax.Array
    labels: jax.Array
    weight: jax.Array


def training(plan: Plan, dataset: ImageDataset, devices: Devices, epoch: int) -> Iterator[Batch]:
    """The batches of an epoch, with the labels that are trained on."""
    rows = devices.rows(plan.batch_size)

    def load(step: int) -> Batch:
        indices = order[step][rows]
        images, labels = dataset.train.batch(indices, (plan.seed, 3, epoch))
        labels = (labels + plan.shift[indices]) % dataset.classes
        return _put(devices, images, labels, np.ones(len(labels), np.float32))

    order = plan.order(epoch)
    return _ahead(load, len(order))


def evaluation(
    images: Images, indices: np.ndarray, batch_size: int, devices: Devices
) -> Iterator[Batch]:
    """Examples in batches of one size, the last one filled up."""
    count = -(-len(indices) // batch_size)
    position = np.arange(count * batch_size).reshape(count, batch_size)
    rows = devices.rows(batch_size)

    def load(step: int) -> Batch:
        mine = position[step][rows]
        some = indices[np.minimum(mine, len(indices) - 1)]
        weight = (mine < len(indices)).astype(np.float32)
        return _put(devices, *images.batch(some, None), weight)

    return _ahead(load, count)


def _put(devices: Devices, *arrays: np.ndarray) -> Batch:
    return Batch(*map(devices.put, arrays))


def _ahead(load: Callable[[int], Batch], count: int) -> Iterator[Batch]:
    """Batches in order, each loaded a little before it is asked for."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = [pool.submit(load, i) for i in range(min(_AHEAD, count))]
        for i in range(count):
            batch = waiting.pop(0).result()
            if i + _AHEAD < count:
                waiting.append(pool.submit(load, i + _AHEAD))
            yield batch
