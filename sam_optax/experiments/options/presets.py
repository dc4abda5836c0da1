"""The presets: settings of the papers' tables, as ``presets.toml`` has them."""

import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple, TypeAlias

from sam_optax.experiments.types import Json, Record

CHOSEN_HERE = "not printed; chosen here"
WHOLE_BATCH = "the whole batch"  # the value of m where a paper has no groups


class Found(NamedTuple):
    """A value, where it is from, and whether a paper prints it."""

    value: Any
    source: str
    printed: bool = False


Values: TypeAlias = Mapping[str, Found]  # settings or hyperparameters, by name


class Preset(NamedTuple):
    """A table of a paper."""

    title: str
    methods: Sequence[str]  # trained by default
    shared: Values  # of all methods
    rows: Mapping[str, Values]  # of a method: its settings and hyperparameters
    differs: Sequence[str] = ()  # this trainer from the paper
    give: str = ""  # as --model, where the network is pretrained


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


def _values(by_source: Json) -> Values:
    return {
        name: Found(value, source, source != CHOSEN_HERE)
        for source, values in by_source.items()
        for name, value in values.items()
    }


def _preset(shared: Json, rows: Json, **about: Any) -> Preset:
    by_method = {method: _values(row) for method, row in rows.items()}
    return Preset(shared=_values(shared), rows=by_method, **about)


_TABLES = tomllib.loads((resources.files(__package__) / "presets.toml").read_text("utf-8"))
PRESETS = {name: _preset(**_extended(name)) for name in _TABLES if not name.startswith("_")}
