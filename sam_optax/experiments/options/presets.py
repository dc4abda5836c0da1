"""The presets: what ``presets.toml`` says of the papers' tables."""

import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from types import MappingProxyType
from typing import Any, NamedTuple

from sam_optax.experiments.types import Json, Record

WHOLE_BATCH = "the whole batch"
"""The value of ``m`` where a paper has no groups."""


class Preset(NamedTuple):
    """A table of a paper."""

    title: str
    method: str  # proposed by the paper
    source: str  # where the values are printed, unless ``places`` says otherwise
    printed: Json
    rows: Mapping[str, Json]  # method -> values printed for this method only
    data: str = "not printed"  # the paper's
    places: Mapping[str, str] = MappingProxyType({})
    stand_ins: Json = MappingProxyType({})  # chosen here
    stand_in_rows: Mapping[str, Json] = MappingProxyType({})
    differs: Sequence[str] = ()  # this trainer from the paper
    methods: Sequence[str] = ()  # trained by default, if not all rows
    init: str = ""  # the pretrained params, if it starts from any
    give: str = ""  # as the data, if not a copy of a Hugging Face data set


def _extended(tables: Json, name: str) -> Record:
    """A table with the values of its family: tables are merged, lists follow one another."""
    own = dict(tables[name])
    family: Any = _extended(tables, own.pop("extends")) if "extends" in own else {}
    return _merged(family, own)


def _merged(family: Json, own: Json) -> Record:
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
    names = (name for name in tables if not name.startswith("_"))  # which is a family
    return {name: Preset(**_extended(tables, name)) for name in names}


PRESETS = _presets()
