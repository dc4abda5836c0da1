"""What a comparison has found, for a notebook or a program."""

import dataclasses
import functools
import io

from rich.console import Console

from sam_optax.experiments.reporting import table
from sam_optax.experiments.types import Json, PyTree


@dataclasses.dataclass(frozen=True, repr=False)
class Result:
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
        table.print_results(Console(highlight=False), self.results)

    def _recorded(self) -> Console:
        # In a notebook a console would show what it prints, instead of writing to its file.
        file = io.StringIO()
        console = Console(file=file, force_jupyter=False, record=True, width=120, highlight=False)
        table.print_results(console, self.results)
        return console

    def __repr__(self) -> str:
        return self._recorded().export_text()

    def _repr_html_(self) -> str:
        form = '<pre style="font-family:monospace;line-height:1.3">{code}</pre>'
        return self._recorded().export_html(inline_styles=True, code_format=form)
