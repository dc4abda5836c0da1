"""The style of each method, the same in every figure."""

from collections.abc import Sequence
from typing import Any, NamedTuple

# Okabe and Ito's palette (grey for black), which colour-blind readers can tell apart. Line
# styles and markers repeat the distinction for print without colour. Methods in one row share a
# colour and differ in the rest, so there are at most five; those often drawn together are in
# different rows.
METHODS = {
    "#666666": ("sgd", "sam_polyak", "bsam"),
    "#0072B2": ("sam", "sam_full", "sam_db", "sam_noise", "stable_sam"),
    "#E69F00": ("asam", "f_asam", "every", "ss_sam", "gc_sam"),
    "#009E73": ("rsam", "rgsam", "looksam", "low_pass", "lookbehind"),
    "#D55E00": ("fsam", "fisher_sam", "f_fisher_sam", "part", "zsharp"),
    "#CC79A7": ("gsam", "momentum", "delta_sam", "esam", "xsam"),
    "#56B4E9": ("wsam", "wsam_decoupled", "msam", "sam_batches", "le_sam"),
    "#B3A000": ("vasso", "ssam_f", "ssam_d", "m_asam", "ae_sam"),
    "#8C564B": ("x_sam", "gam", "sampa", "ada_sam", "light_sam"),
}
_LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


class Style(NamedTuple):
    """The style of a method, as matplotlib arguments."""

    color: str
    linestyle: Any
    marker: str


def style(method: str, repeat: int = 0) -> Style:
    """The style of a method that is already in the figure ``repeat`` times, with other radii."""
    for row, (colour, names) in enumerate(METHODS.items()):
        if method in names:
            i = row + names.index(method) + repeat
            return Style(colour, _LINES[i % 5], _MARKERS[(i + 2 * names.index(method)) % 8])
    return Style("#000000", _LINES[repeat % 5], _MARKERS[repeat % 8])


def styles(methods: Sequence[str]) -> list[Style]:
    """The styles of the methods in a figure, where a method may occur several times."""
    return [style(name, methods[:i].count(name)) for i, name in enumerate(methods)]
