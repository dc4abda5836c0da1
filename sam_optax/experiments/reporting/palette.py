"""The style of each method, the same in every figure of a run."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from sam_optax.experiments.types import Json

# Okabe and Ito's palette (grey for black) and two more, which colour-blind readers can tell apart.
# Line styles and markers repeat the distinction for print without colour: 45 methods differ in
# colour or line, and in colour or marker.
_COLOURS: tuple[str, ...] = ("#666666", "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7")
_COLOURS += ("#56B4E9", "#B3A000", "#8C564B")
_LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


class Style(NamedTuple):
    """The style of a method, as matplotlib arguments."""

    color: str
    linestyle: Any
    marker: str

    def again(self, repeat: int) -> "Style":
        """That of the same method with other radii, which keeps its colour."""
        line, marker = _LINES.index(self.linestyle), _MARKERS.index(self.marker)
        return Style(self.color, _LINES[(line + repeat) % 5], _MARKERS[(marker + repeat) % 8])


def styles(methods: Sequence[str]) -> list[Style]:
    """The styles by position; a method may occur several times."""
    order = {name: i for i, name in enumerate(dict.fromkeys(methods))}
    first = {
        name: Style(_COLOURS[i % 9], _LINES[i % 5], _MARKERS[i % 8]) for name, i in order.items()
    }
    return [first[name].again(methods[:i].count(name)) for i, name in enumerate(methods)]


def styled(methods: Sequence[Json]) -> list[tuple[Json, Style]]:
    """The methods of a run, as in its results, with their styles."""
    return list(zip(methods, styles([of["method"] for of in methods]), strict=True))
