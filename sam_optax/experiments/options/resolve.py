"""A run as plain data: each setting with its value and its source, in words."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from sam_optax.experiments.errors import UserError
from sam_optax.experiments.methods import method as methods
from sam_optax.experiments.methods import registry
from sam_optax.experiments.methods.method import Variant
from sam_optax.experiments.named import is_spec
from sam_optax.experiments.options.declare import flag
from sam_optax.experiments.options.options import DEFAULTS, UNMENTIONED, Compare
from sam_optax.experiments.options.presets import CHOSEN_HERE, WHOLE_BATCH, Found, Values
from sam_optax.experiments.reporting import words
from sam_optax.experiments.reporting.words import plain
from sam_optax.experiments.types import Json, Record

CHOSEN_ON_DIGITS = "default, chosen on digits"
_OF_HUGGING_FACE = ("image_column", "label_column", "test_split")
_RECORDED = ("seeds", "seed_offset", "preset", "tune", "tune_lr", "trials", *_OF_HUGGING_FACE)
# The task on which radii and weight decays were chosen.
_THERE = {name: DEFAULTS[name] for name in ("dataset", "label_noise", "model")}


def resolve(options: Compare) -> Record:
    """The run that the options define, as in ``results.json``, without what its data add.

    Raises:
      UserError: a method is unknown, or a value is missing, invalid or of no use.
    """
    _check_given(options, _settings(options))
    rows = [row for name in _methods(options) for row in _rows(name, options)]
    common = {
        name: setting
        for name, setting in rows[0]["settings"].items()
        if all(row["settings"][name]["value"] == setting["value"] for row in rows)
    }
    for row in rows:
        row["settings"] = {k: of for k, of in row["settings"].items() if k not in common}
    run = {"settings": {**_of_options(options), **common}, "methods": rows}
    return {**run, "notes": _notes(options, run)}


def _settings(options: Compare, method: str = "") -> Values:
    """The settings of a method, or those that all share, where they are not given."""
    if preset := options.table:
        unmentioned = _sourced(UNMENTIONED, "not mentioned; default")
        return {**unmentioned, **preset.shared, **preset.rows.get(method, {})}
    found = _sourced(DEFAULTS, "default")
    if options.dataset not in (None, "digits", "mnist5k"):
        found["label_noise"] = Found(0.0, "default")  # labels of a user's data stay as they are
    if method and (decay := registry.get(method).weight_decay) is not None:
        found["weight_decay"] = Found(decay, _source(method, CHOSEN_ON_DIGITS))
    return found


def _source(method: str, built_in: str) -> str:
    """That of a method's own values, which of those built in is known."""
    return f"default of {method}" if is_spec(method) else built_in


def _sourced(values: Json, source: str) -> dict[str, Found]:
    return {name: Found(value, source) for name, value in values.items()}


def _chosen(given: Any, found: Found | None) -> Record:
    """The value that is given, or else what is found, with its source; empty without any."""
    if given is None:
        return {"value": found.value, "source": found.source} if found else {}
    paper = f"; the paper's is {found.value}" if found and found.printed else ""
    return {"value": given, "source": f"given{paper}"}


def _check_given(options: Compare, found: Values) -> None:
    """Asks for what goes with options: data and network of a preset, an optimizer's rate."""
    data, optimizer = found["dataset"].value, found["optimizer"].value
    asked, pretrained = f"--preset {options.preset}", options.table and options.table.give
    if options.preset and options.dataset is None:
        raise UserError(f"{asked}: needs the data ({data}); give --dataset hf:NAME_OR_PATH.")
    if pretrained and options.model is None:
        raise UserError(f"{asked}: starts from a pretrained network; give --model {pretrained}.")
    for name in (*_OF_HUGGING_FACE, "image_size"):
        value, of = getattr(options, name), options.dataset or data
        if value is not None and not of.startswith("hf:"):
            needed = f"needs --dataset hf:NAME_OR_PATH, not {of}; leave it out."
            raise UserError(f"{flag(name)} {value}: {needed}")
    if options.optimizer not in (None, optimizer) and options.lr is None:
        raise UserError(
            f"--optimizer {options.optimizer}: the learning rate, {found['lr'].value:g}, was "
            f"chosen for {optimizer}; give --lr (and consider --weight-decay)."
        )


def _of_options(options: Compare) -> Record:
    found = {}
    for name in _RECORDED:
        value, default = getattr(options, name), getattr(Compare, name)
        if value is not None and value is not False:  # not given
            found[name] = {"value": value, "source": "default" if value == default else "given"}
    return found


def _methods(options: Compare) -> Sequence[str]:
    names = options.methods or (options.table.methods if options.table else registry.DEFAULT)
    short = [registry.get(name).name for name in names]
    for name, its in zip(names, short, strict=True):
        if short.count(its) > 1 and is_spec(name):
            raise UserError(f"--methods {name}: one of two named {its}; rename its function.")
    for asked in options.hyperparameters:
        if (name := asked.partition(".")[0]) not in short:
            raise UserError(f"{flag(asked)}: {name} is not trained; add it to --methods.")
    return names


def _rows(name: str, options: Compare) -> Iterator[Record]:
    """A method, once for each combination of the values of its hyperparameters."""
    method, found, values = registry.get(name), _settings(options, name), _values(name, options)
    settings = {s: _chosen(getattr(options, s), found[s]) for s in DEFAULTS}
    settings["m"] = _group_size(name, settings)
    for chosen in itertools.product(*(found["value"] for found in values.values())):
        own = dict(zip(values, chosen, strict=True))
        methods.check(Variant(method, own))
        varied = (o for o, found in values.items() if len(found["value"]) > 1)
        yield {
            "name": " ".join([method.name, *(f"{o} {plain(own[o])}" for o in varied)]),
            "method": name,
            "title": method.title,
            "hyperparameters": own,
            "sources": {option: found["source"] for option, found in values.items()},
            "settings": settings,
        }


def _values(name: str, options: Compare) -> dict[str, Record]:
    """The values of each hyperparameter to train with, with their source."""
    method, preset, several = registry.get(name), options.table, {}
    row = preset.rows.get(name, {}) if preset else {}
    for option, parameter in method.options.items():
        asked = flag(f"{method.name}.{option}")
        given = options.hyperparameters.get(f"{method.name}.{option}")
        found, default = row.get(option), parameter.default
        if found is None and default is not None and not (preset and option in method.radius):
            found = Found(default, _source(name, CHOSEN_HERE if preset else CHOSEN_ON_DIGITS))
        chosen = _chosen(given, found)
        if not chosen and default is not None:
            raise UserError(
                f"--preset {options.preset}: has no value of {option} for {name}; give {asked}."
            )
        if chosen:
            values = given or (chosen["value"],)
            if options.tune and option in method.radius and (len(values) > 1 or values[0] <= 0):
                raise UserError(
                    f"--tune: {asked} {' '.join(map(plain, values))}: the search starts at one "
                    "radius above 0; give one, or leave out --tune."
                )
            if not all(of > -math.inf for of in values if isinstance(of, float)):
                raise UserError(f"{asked} {' '.join(map(plain, values))}: use numbers, or inf.")
            texts = ["inf" if of == math.inf else of for of in values]  # JSON has no infinity
            several[option] = {**chosen, "value": texts}
    return several


def _group_size(name: str, settings: Json) -> Record:
    """The setting m, where the whole batch is given by its size."""
    batch_size, m = (settings[name]["value"] for name in ("batch_size", "m"))
    source = settings["m"]["source"]
    if m in (None, WHOLE_BATCH):
        return {"value": batch_size, "source": f"{source} ({WHOLE_BATCH})"}
    if not registry.get(name).groups and m != batch_size:
        source = f"{source}, but {name} has no groups ({WHOLE_BATCH})"
        return {"value": batch_size, "source": source}
    if batch_size % m:
        divisor = next(d for d in range(min(m, batch_size), 0, -1) if batch_size % d == 0)
        raise UserError(
            f"--m {m}: does not divide the batch size, {batch_size}; use a divisor, as {divisor}."
        )
    return {"value": m, "source": source}


def _notes(options: Compare, run: Json) -> list[str]:
    """What a reader should know: values chosen here, what was chosen elsewhere, and the paper."""
    chosen = [
        f"{method}'s {name} {plain(value)}" if method else f"{name} {plain(value)}"
        for method, name, value, source in words.settings(run)
        if source == CHOSEN_HERE
    ]
    notes = [f"Not printed in the paper, chosen here: {', '.join(chosen)}."] if chosen else []
    elsewhere = {  # methods whose radius was chosen elsewhere
        row["method"]: None
        for row in run["methods"]
        if {row["sources"][of] for of in registry.get(row["method"]).radius} == {CHOSEN_ON_DIGITS}
    }
    if options.tune:
        notes.append(
            f"--tune: radii,{' learning rates,' * options.tune_lr} weight decays and stopping "
            "epochs are chosen on a fifth of the training examples, held out with the labels "
            "trained on, from seeds of their own."
        )
    elif elsewhere and any(run["settings"][k]["value"] != value for k, value in _THERE.items()):
        notes.append(
            f"The radii and weight decays of {', '.join(elsewhere)} were chosen on digits with "
            "40 % wrong labels, for the mlp, and this task may need others: add --tune, which "
            "chooses them on held-out examples, or give them."
        )
    return [*notes, *(options.table.differs if options.table else ())]
