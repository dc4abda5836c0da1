"""Figures that notebooks show. Importing this module imports matplotlib."""

import io

from matplotlib.figure import Figure


class NotebookFigure(Figure):
    """A figure that notebooks display without pyplot."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=110)
        return file.getvalue()
