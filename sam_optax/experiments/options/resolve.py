"""A run as plain data: each setting with its value and its source, in words."""

import dataclasses
import inspect
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import sam_optax
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.methods import method as methods
from sam_optax.experiments.methods import registry
from sam_optax.experiments.methods.method import Variant
from sam_optax.experiments.named import is_spec
from sam_optax.experiments.options.declare import flag
from sam_optax.experiments.options.options import DEFAULTS, FIELDS, UNMENTIONED, Compare
from sam_optax.experiments.options.presets import PRESETS, WHOLE_BATCH, Preset
from sam_optax.experiments.reporting import words
from sam_optax.experiments.reporting.words import plain
from sam_optax.experiments.training.task import Recipe
from sam_optax.experiments.types import Json, Record

RECIPE = tuple(field.name for field in dataclasses.fields(Recipe))
SHARED = ("dataset", "model", "label_noise", "image_size", "sharpness_rho")
"""Settings that all methods of a run share."""
CHOSEN_HERE = "not printed; chosen here"
CHOSEN_ON_DIGITS = "default, chosen on digits"
_ALWAYS = ("dtype", "seeds", "seed_offset")
_WHERE_GIVEN: tuple[str, ...] = ("preset", "tune", "tune_lr", "trials", "save_every", "init")
_WHERE_GIVEN += ("image_column", "label_column", "test_split")
_THERE = {name: DEFAULTS[name] for name in ("dataset", "label_noise", "model")}
"""The task on which radii and weight decays were chosen."""


class Layer(NamedTuple):
    """Values of one source, which count where no layer before has one."""

    values: Json
    source: str
    printed: bool = False  # in the paper of a preset


def resolve(options: Compare) -> Record:
    """The run that the options define, as in ``results.json``, without what its data add.

    Raises:
      UserError: a method is unknown, or a value is missing, invalid or of no use.
    """
    preset = PRESETS[options.preset] if options.preset else None
    if preset and options.dataset is None:
        copy = f"a copy of {preset.data} that datasets.Dataset.save_to_disk wrote"
        give = preset.give or f"hf:NAME_OR_PATH, such as {copy}"
        raise UserError(f"--preset {options.preset}: needs the data; give --dataset {give}.")
    layers = _layers(options, preset)
    _check_learning_rate(options, layers)
    shared = {name: _found(name, getattr(options, name), layers) for name in SHARED}
    rows = [row for name in _methods(options, preset) for row in _rows(name, options, preset)]
    common = {
        name: setting
        for name, setting in rows[0]["settings"].items()
        if all(row["settings"][name]["value"] == setting["value"] for row in rows)
    }
    for row in rows:
        row["settings"] = {k: of for k, of in row["settings"].items() if k not in common}
    run = {"settings": {**_of_options(options), **shared, **common}, "methods": rows}
    return {**run, "notes": _notes(options, run, preset)}


def _of_options(options: Compare) -> Record:
    found = {}
    for name in (*_ALWAYS, *_WHERE_GIVEN):
        given = getattr(options, name) != FIELDS[name].default
        if given or name in _ALWAYS:
            source = "given" if given else "default"
            found[name] = {"value": getattr(options, name), "source": source}
    return found


def _methods(options: Compare, preset: Preset | None) -> Sequence[str]:
    names: Sequence[str] = (preset.methods or tuple(preset.rows)) if preset else registry.DEFAULT
    if options.methods is not None:
        names = options.methods
    short = [registry.get(name).name for name in names]
    for name, its in zip(names, short, strict=True):
        if names.count(name) > 1:
            raise UserError(f"--methods {name}: given twice; name each method once.")
        if short.count(its) > 1:
            raise UserError(f"--methods {name}: one of two named {its}; rename its function.")
    for asked in options.hyperparameters:
        if (name := asked.partition(".")[0]) not in short:
            raise UserError(
                f"{flag(asked)}: {name} is not trained; add it to --methods, or leave it out."
            )
    return names


def _layers(options: Compare, preset: Preset | None, method: str = "") -> list[Layer]:
    """Where the settings of a method come from, or of all (``""``), if they are not given."""
    if preset is None:
        decay = registry.get(method).weight_decay if method else None
        chosen = {} if decay is None else {"weight_decay": decay}
        ours = options.dataset in (None, "digits", "mnist5k")
        noise = {} if ours else {"label_noise": 0.0}  # labels of a user's data stay as they are
        return [Layer(chosen, _of_method(method)), Layer({**DEFAULTS, **noise}, "default")]
    printed = {"dataset": preset.data, **preset.printed, **preset.rows.get(method, {})}
    return [
        *(Layer({name: printed[name]}, place, True) for name, place in preset.places.items()),
        Layer(printed, preset.source, True),
        Layer(preset.stand_ins, CHOSEN_HERE),
        Layer(UNMENTIONED, "not mentioned; default"),
    ]


def _layers_of_hyperparameters(name: str, preset: Preset | None) -> list[Layer]:
    method, function = registry.get(name), getattr(sam_optax, name, None)
    defaults = {k: of.default for k, of in method.options.items() if of.default is not None}
    if preset is None:
        return [Layer(defaults, _of_method(name))]
    known = inspect.signature(function).parameters if function else {}
    numbers = {k: p.default for k, p in known.items() if isinstance(p.default, int | float)}
    return [
        Layer(preset.rows.get(name, {}), preset.source, True),
        Layer(preset.stand_in_rows.get(name, {}), CHOSEN_HERE),
        Layer({k: numbers[k] for k in defaults if k in numbers}, f"default of sam_optax.{name}"),
        Layer({k: of for k, of in defaults.items() if k not in method.radius}, CHOSEN_HERE),
    ]


def _of_method(name: str) -> str:
    """The source of a method's own values."""
    return f"default of {name}" if is_spec(name) else CHOSEN_ON_DIGITS


def _found(name: str, given: Any, layers: Sequence[Layer]) -> Record:
    """The value that is given, or else that of the first layer with one; empty without any."""
    layer = next((layer for layer in layers if name in layer.values), None)
    if given is not None:
        paper = f"; the paper's is {layer.values[name]}" if layer and layer.printed else ""
        return {"value": given, "source": f"given{paper}"}
    return {"value": layer.values[name], "source": layer.source} if layer else {}


def _rows(name: str, options: Compare, preset: Preset | None) -> Iterator[Record]:
    """A method, once for each combination of the values of its hyperparameters."""
    method, layers = registry.get(name), _layers(options, preset, name)
    settings = {s: _found(s, getattr(options, s), layers) for s in RECIPE}
    settings["m"] = _group_size(name, settings)
    values = _hyperparameters(name, options, preset)
    for chosen in itertools.product(*(found["value"] for found in values.values())):
        hyperparameters = dict(zip(values, chosen, strict=True))
        methods.check(Variant(method, hyperparameters))
        varied = (o for o, found in values.items() if len(found["value"]) > 1)
        yield {
            "name": " ".join([method.name, *(f"{o} {plain(hyperparameters[o])}" for o in varied)]),
            "method": name,
            "title": method.title,
            "hyperparameters": {  # JSON has no infinity
                option: str(value) if value == math.inf else value
                for option, value in hyperparameters.items()
            },
            "sources": {option: found["source"] for option, found in values.items()},
            "settings": settings,
        }


def _hyperparameters(name: str, options: Compare, preset: Preset | None) -> dict[str, Record]:
    """The values of each hyperparameter to train with, with their source."""
    method, layers, several = registry.get(name), _layers_of_hyperparameters(name, preset), {}
    for option, parameter in method.options.items():
        asked = f"{method.name}.{option}"
        given, asked = options.hyperparameters.get(asked), flag(asked)
        found = _found(option, given, layers)
        if given == ():
            raise UserError(f"{asked}: no value is given; give one or several.")
        if not found and parameter.default is not None:
            raise UserError(
                f"--preset {options.preset}: has no value of {option} for {name}; give {asked}."
            )
        if found:
            values = given or (found["value"],)
            text = f"{asked} {' '.join(map(plain, values))}"
            if len({*values}) < len(values):
                raise UserError(f"{text}: a value is given twice; give each once.")
            if option in method.radius and options.tune and (len(values) > 1 or values[0] <= 0):
                raise UserError(
                    f"--tune: {text}: the search starts at one radius above 0; give one, or leave "
                    "out --tune."
                )
            several[option] = {**found, "value": values}
    return several


def _check_learning_rate(options: Compare, layers: Sequence[Layer]) -> None:
    """Asks for the learning rate of an optimizer for which none was chosen."""
    own, rate = (_found(name, None, layers) for name in ("optimizer", "lr"))
    if options.optimizer and options.lr is None and options.optimizer != own["value"]:
        raise UserError(
            f"--optimizer {options.optimizer}: the learning rate, {rate['value']:g}, was chosen "
            f"for {own['value']}; give --lr (and consider --weight-decay)."
        )


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
            f"--m {m}: does not divide the batch size, {batch_size}; use a number that does, such "
            f"as {divisor}."
        )
    return {"value": m, "source": source}


def _notes(options: Compare, run: Json, preset: Preset | None) -> list[str]:
    """What a reader should know: values chosen here, what was chosen elsewhere, and the paper."""
    chosen = [
        f"{method}'s {name} {plain(value)}" if method else f"{name} {plain(value)}"
        for method, name, value, source in words.settings(run)
        if source.startswith("not printed")
    ]
    notes = [f"Not printed in the paper, chosen here: {', '.join(chosen)}."] if chosen else []
    elsewhere = {  # methods whose radius was chosen elsewhere
        row["method"]: registry.get(row["method"]).radius[0]
        for row in run["methods"]
        if {row["sources"][of] for of in registry.get(row["method"]).radius} == {CHOSEN_ON_DIGITS}
    }
    if options.tune:
        notes.append(
            "--tune: radii, weight decays and stopping epochs are chosen on a fifth of the "
            "training examples, held out with the labels trained on, from seeds of their own."
        )
    elif elsewhere and any(run["settings"][k]["value"] != value for k, value in _THERE.items()):
        method, option = next(iter(elsewhere.items()))
        half = registry.get(method).options[option].default / 2
        notes.append(
            f"The radii and weight decays of {', '.join(elsewhere)} were chosen on digits with "
            "40 % wrong labels, for the mlp, and this task may need others: add --tune, which "
            f"chooses them on held-out examples, or give them, as in "
            f"{flag(f'{method}.{option}')} {half:g}."
        )
    return [*notes, *(preset.differs if preset else ())]
