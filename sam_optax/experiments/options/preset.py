"""What a preset is."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Preset(NamedTuple):
    """A table of a paper."""

    title: str
    data: str | None  # the paper's, if it is printed
    method: str  # proposed by the paper
    source: str  # where the values are printed, unless ``places`` says otherwise
    printed: Mapping[str, Any]
    rows: Mapping[str, Mapping[str, Any]]  # method -> values printed for this method only
    places: Mapping[str, str] = {}
    stand_ins: Mapping[str, Any] = {}
    stand_in_rows: Mapping[str, Mapping[str, Any]] = {}
    differs: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()  # trained by default, if not all rows
    init: str = ""  # the pretrained params, if it starts from any
    give: str = ""  # as the data, if not a copy of a Hugging Face data set
