"""What a comparison has found, for a notebook or a program."""

import dataclasses
import functools
import io

from rich.console import Console

from sam_optax.experiments.reporting import table
from sam_optax.experiments.types import Json, PyTree


@dataclasses.dataclass(frozen=True)
class Result:
    """What :func:`sam_optax.experiments.compare` returns; a notebook shows it as a table.

    Attributes:
      results: all numbers as plain data, as in ``results.json``.
      params: the trained variables, ``params[method][seed]``, as the network's ``init`` gives them.
    """

    results: Json
    params: dict[str, dict[int, PyTree]] = dataclasses.field(repr=False)

    @functools.cached_property
    def figures(self) -> dict[str, bytes]:
        """The figures as PNG, by file name; ``IPython.display.Image`` shows one."""
        from sam_optax.experiments.reporting import figures  # slow to import

        return figures.all_figures(self.results)

    def print(self) -> None:
        """Prints the table."""
        table.print_results(Console(highlight=False), self.results)

    def _repr_html_(self) -> str:
        console = Console(file=io.StringIO(), record=True, width=120, highlight=False)
        table.print_results(console, self.results)
        form = '<pre style="font-family:monospace;line-height:1.3">{code}</pre>'
        return console.export_html(inline_styles=True, code_format=form)
