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


def _merged(family: Any, own: Any) -> Any:
    """Tables are merged, lists follow one another; of other values the own one counts."""
    if isinstance(own, Mapping):
        both = {name: _merged(family[name], own[name]) for name in family.keys() & own.keys()}
        return {**family, **own, **both}
    return family + own if isinstance(own, list) else own


def _extended(name: str) -> Record:
    """A table with the values of its family."""
    own = dict(_TABLES[name])
    return _merged(_extended(own.pop("extends")) if "extends" in own else {}, own)


_TOML = resources.files(__package__).joinpath("presets.toml").read_text(encoding="utf-8")
_TABLES = tomllib.loads(_TOML)
PRESETS = {
    name: Preset(**_extended(name))
    for name in _TABLES
    if not name.startswith("_")  # which is a family
}
