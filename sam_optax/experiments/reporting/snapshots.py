"""The networks of a run before its end, in files like ``params.npz``."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax

from sam_optax.experiments.reporting import results
from sam_optax.experiments.reporting.output import OutputDirectory
from sam_optax.experiments.types import PyTree


def file_name(epoch: int) -> str:
    """The file of all networks after an epoch."""
    return f"params_epoch_{epoch}.npz"


def epochs(every: int, last: int) -> Iterator[int]:
    """After which epochs there are networks of a method: every so many (0: none), and the last."""
    yield from range(every or last, last, every or last)
    yield last


def by_seed(
    variables: Mapping[str, PyTree], seeds: tuple[int, ...]
) -> dict[str, dict[int, PyTree]]:
    """The variables of each method, which have an axis of seeds in front, by method and seed."""
    return {
        name: {seed: jax.tree.map(lambda leaf, i=i: leaf[i], of) for i, seed in enumerate(seeds)}
        for name, of in variables.items()
    }


def to_npz(variables: Mapping[str, PyTree], seeds: tuple[int, ...]) -> bytes:
    """The file of the variables of each method, which have an axis of seeds in front."""
    return results.params_to_npz(by_seed(variables, seeds))


class Snapshots(NamedTuple):
    """Writes networks while they are trained, after every so many epochs."""

    out: OutputDirectory
    every: int
    seeds: tuple[int, ...]

    def save(self, epoch: int, variables: Mapping[str, PyTree]) -> None:
        """Writes the variables of each method, an axis of seeds in front of every leaf."""
        self.out.write({file_name(epoch): to_npz(variables, self.seeds)})
