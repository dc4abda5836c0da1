"""What a comparison has found, for a notebook or a program."""

import dataclasses
import functools
import io

from sam_optax.experiments.reporting.console import Console
from sam_optax.experiments.reporting.table import ResultsTable
from sam_optax.experiments.types import Json, PyTree


@dataclasses.dataclass(frozen=True, repr=False)
class Result(ResultsTable):
    """What :func:`sam_optax.experiments.compare` returns; shown as a table.

    Attributes:
      results: all numbers as plain data, as in ``results.json``.
      params: the trained variables, ``params[method][seed]``, as the network's ``init`` gives them.
    """

    results: Json
    params: dict[str, dict[int, PyTree]]

    @functools.cached_property
    def figures(self) -> dict[str, bytes]:
        """The figures as PNG, by file name; ``IPython.display.Image`` shows one."""
        from sam_optax.experiments.reporting import figures  # slow to import

        return figures.all_figures(self.results)

    def print(self) -> None:
        """Prints the table."""
        Console().print(self, soft_wrap=True)  # paths stay on one line

    def __repr__(self) -> str:
        file = io.StringIO()  # a console would show in a notebook what it prints
        Console(file=file, width=120, force_jupyter=False).print(self)
        return file.getvalue()
