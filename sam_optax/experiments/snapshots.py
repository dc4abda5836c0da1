"""A training between two epochs, as data: taken from the runners, and put back into new ones."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np


class Snapshot(NamedTuple):
    """All that the rest of a training needs; the order of examples depends on the epoch alone.

    Attributes:
      epoch: epochs that are done.
      record: what was measured of each runner, as plain data: ``seconds`` and ``curves``.
      arrays: ``params`` and ``state`` of each runner, NumPy arrays, a leading seed axis each.
    """

    epoch: int
    record: dict[str, dict[str, Any]]
    arrays: dict[str, Any]


class Checkpointer(Protocol):
    """Keeps snapshots where a later process finds them.

    Attributes:
      every: epochs between snapshots; 0 for none.
      epoch: epochs that the last snapshot has done; 0 if there is none.
    """

    every: int
    epoch: int

    def restore(self, like: Any) -> Snapshot:
        """The last snapshot, given arrays of the same structure, shapes and dtypes."""

    def save(self, snapshot: Snapshot) -> None:
        """Keeps a snapshot."""


class Runner(Protocol):
    """A method on its way."""

    name: str
    params: Any
    state: Any
    seconds: list[float]


Curves = Mapping[str, list[dict[str, np.ndarray]]]
"""What was measured after each epoch, by name of the runner."""


def take(epoch: int, runners: Iterable[Runner], curves: Curves) -> Snapshot:
    """The snapshot of runners after so many epochs."""
    runners = list(runners)
    record = {
        runner.name: {
            "seconds": list(runner.seconds),
            "curves": [
                {key: values.tolist() for key, values in point.items()}
                for point in curves.get(runner.name, ())
            ],
        }
        for runner in runners
    }
    return Snapshot(epoch, record, jax.device_get(arrays(runners)))


def put(snapshot: Snapshot, runners: Iterable[Runner], curves: Curves) -> None:
    """Brings runners and curves that have not begun to where the snapshot was taken."""
    for runner in runners:
        saved = jax.device_put(snapshot.arrays[runner.name])
        runner.params, runner.state = saved["params"], saved["state"]
        record = snapshot.record[runner.name]
        runner.seconds[:] = record["seconds"]
        if runner.name in curves:
            curves[runner.name][:] = [
                {key: np.array(values, np.float32) for key, values in point.items()}
                for point in record["curves"]
            ]


def arrays(runners: Iterable[Runner]) -> dict[str, Any]:
    """The part of a snapshot that is arrays, where they are."""
    return {runner.name: {"params": runner.params, "state": runner.state} for runner in runners}
