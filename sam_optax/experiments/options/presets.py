"""The presets: what ``presets.toml`` says of the papers' tables."""

import functools
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any, NamedTuple

from sam_optax.experiments.types import Record


class Preset(NamedTuple):
    """A table of a paper."""

    title: str
    method: str  # proposed by the paper
    source: str  # where the values are printed, unless ``places`` says otherwise
    printed: Mapping[str, Any]
    rows: Mapping[str, Mapping[str, Any]]  # method -> values printed for this method only
    data: str | None = None  # the paper's, if it is printed
    places: Mapping[str, str] = {}
    stand_ins: Mapping[str, Any] = {}  # chosen here
    stand_in_rows: Mapping[str, Mapping[str, Any]] = {}
    differs: tuple[str, ...] = ()  # this trainer from the paper
    methods: tuple[str, ...] = ()  # trained by default, if not all rows
    init: str = ""  # the pretrained params, if it starts from any
    give: str = ""  # as the data, if not a copy of a Hugging Face data set


def _merged(family: Mapping[str, Any], own: Mapping[str, Any]) -> Record:
    """A table that extends its family: tables are merged, lists follow one another."""
    found = {**family, **own}
    for name in family.keys() & own.keys():
        if isinstance(own[name], Mapping):
            found[name] = _merged(family[name], own[name])
        elif isinstance(own[name], list):
            found[name] = family[name] + own[name]
    return found


def _presets() -> dict[str, Preset]:
    text = resources.files(__package__).joinpath("presets.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)

    @functools.cache
    def whole(name: str) -> Record:
        own = dict(tables[name])
        family = own.pop("extends", None)
        return _merged(whole(family), own) if family else own

    found = {}
    for name in tables:
        if not name.startswith("_"):  # a family
            table: Record = {"rows": {}, "printed": {}, **whole(name)}
            table = {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}
            if table["printed"].get("m") == "the whole batch":
                table["printed"] = {**table["printed"], "m": None}
            found[name] = Preset(**table)
    return found


PRESETS = _presets()
