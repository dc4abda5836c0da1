"""A training between two epochs, as data: taken from the runners, and put back into new ones."""

from typing import Any, NamedTuple, Protocol

import numpy as np

from sam_optax.experiments.training.runner import Runner


class Snapshot(NamedTuple):
    """All that the rest of a training needs; the order of examples depends on the epoch alone.

    Attributes:
      epoch: epochs that are done.
      record: what was measured of each runner, as plain data: ``seconds`` and ``curve``.
      arrays: the state of each runner, on the devices.
    """

    epoch: int
    record: dict[str, Any]
    arrays: dict[str, Any]


class Checkpointer(Protocol):
    """Keeps snapshots where a later process finds them.

    Attributes:
      every: epochs between snapshots; 0 for none.
      epoch: epochs that the last snapshot has done; 0 if there is none.
    """

    every: int
    epoch: int

    def restore(self, like: dict[str, Any]) -> Snapshot:
        """The last snapshot, given arrays of the same structure, shapes and dtypes."""

    def save(self, snapshot: Snapshot) -> None:
        """Keeps a snapshot."""


class Training(Protocol):
    """What a snapshot is taken of.

    Attributes:
      runners: the methods on their way.
      curves: what was measured after each epoch, by name and first seed of the runner.
    """

    runners: list[Runner]
    curves: dict[tuple[str, int], list[dict[str, np.ndarray]]]


def arrays(training: Training) -> dict[str, Any]:
    """The states of all runners, where they are."""
    return {_name(runner): runner.state for runner in training.runners}


def take(epoch: int, training: Training) -> Snapshot:
    """The snapshot after so many epochs."""
    record = {
        _name(runner): {
            "seconds": list(runner.seconds),
            "curve": [
                {field: values.tolist() for field, values in point.items()}
                for point in training.curves[runner.name, runner.seeds[0]]
            ],
        }
        for runner in training.runners
    }
    return Snapshot(epoch, record, arrays(training))


def put(snapshot: Snapshot, training: Training) -> None:
    """Brings a training that has not begun to where a snapshot was taken."""
    for runner in training.runners:
        runner.state = snapshot.arrays[_name(runner)]
        record = snapshot.record[_name(runner)]
        runner.seconds[:] = record["seconds"]
        training.curves[runner.name, runner.seeds[0]][:] = [
            {field: np.array(values, np.float32) for field, values in point.items()}
            for point in record["curve"]
        ]


def _name(runner: Runner) -> str:
    return f"{runner.name}/{runner.seeds[0]}"
