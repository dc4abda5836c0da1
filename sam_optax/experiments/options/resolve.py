"""The settings of a run: each value with its source."""

import dataclasses
import inspect
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import sam_optax
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.methods import method as methods
from sam_optax.experiments.methods.method import Variant
from sam_optax.experiments.methods.registry import DEFAULT, METHODS
from sam_optax.experiments.options.declare import flag, suggest
from sam_optax.experiments.options.options import DEFAULTS, OF_OTHERS, UNMENTIONED, Compare
from sam_optax.experiments.options.presets import PRESETS, Preset
from sam_optax.experiments.reporting.words import plain
from sam_optax.experiments.training.task import Recipe
from sam_optax.experiments.types import Json

RECIPE = tuple(field.name for field in dataclasses.fields(Recipe))
SHARED = ("dataset", "model", "label_noise", "image_size", "sharpness_rho")
"""Settings that all methods of a run share."""
CHOSEN_HERE = "not printed; chosen here"
CHOSEN_ON_DIGITS = "default, chosen on digits"


class Setting(NamedTuple):
    """A value with its source, in words."""

    value: Any
    source: str


class Row(NamedTuple):
    """A method of a run."""

    method: str  # in the registry
    variant: Variant
    sources: Mapping[str, str]  # of its hyperparameters
    settings: Mapping[str, Setting]  # those of RECIPE


class Resolved(NamedTuple):
    """The run that the options define: the settings of ``SHARED``, and the methods by name."""

    shared: Mapping[str, Setting]
    rows: Mapping[str, Row]
    preset: Preset | None


def resolve(options: Compare) -> Resolved:
    """The settings that the options define.

    Raises:
      UserError: a method is unknown, or a hyperparameter is missing or invalid.
    """
    preset = PRESETS[options.preset] if options.preset else None
    if preset and options.dataset is None:
        copy = f"a copy of {preset.data} that datasets.Dataset.save_to_disk wrote"
        give = preset.give or f"hf:NAME_OR_PATH, such as {copy}"
        raise UserError(f"--preset {options.preset}: needs the data; give --dataset {give}.")
    shared = {name: _setting(name, options, preset, "") for name in SHARED}
    _check_learning_rate(options, preset)
    rows: dict[str, Row] = {}
    for name in _methods(options, preset):
        settings = {s: _setting(s, options, preset, name) for s in RECIPE}
        settings["m"] = _group_size(name, settings)
        values = {
            option: found
            for option in METHODS[name].options
            if (found := _hyperparameter(name, option, options, preset)) is not None
        }
        for option in METHODS[name].radius if options.tune else ():
            if len(radii := values[option].value) > 1 or radii[0] <= 0:
                given = f"{option_flag(name, option)} {' '.join(map(plain, radii))}"
                raise UserError(
                    f"--tune: {given}: the search starts at one radius above 0; give one, or leave "
                    "out --tune."
                )
        sources = {option: source for option, (_, source) in values.items()}
        varied = [option for option, found in values.items() if len(found.value) > 1]
        for chosen in itertools.product(*(found.value for found in values.values())):
            hyperparameters = dict(zip(values, chosen, strict=True))
            label = " ".join([name, *(f"{o} {plain(hyperparameters[o])}" for o in varied)])
            variant = Variant(METHODS[name], hyperparameters)
            methods.check(name, variant)
            if label in rows:
                raise UserError(
                    f"{option_flag(name, varied[0])}: {label} is given twice; give each value once."
                )
            rows[label] = Row(name, variant, sources, settings)
    _check_unused(options, {row.method for row in rows.values()})
    return Resolved(shared, rows, preset)


def _methods(options: Compare, preset: Preset | None) -> tuple[str, ...]:
    if options.methods is None:
        return (preset.methods or tuple(preset.rows)) if preset else DEFAULT
    if not options.methods:
        raise UserError(f"--methods: none given; name some of {', '.join(METHODS)}.")
    for name in options.methods:
        if name not in METHODS:
            raise UserError(f"--methods {name}: unknown method; {suggest(name, METHODS)}")
        if options.methods.count(name) > 1:
            raise UserError(f"--methods {name}: given twice; name each method once.")
    return options.methods


def _setting(name: str, options: Compare, preset: Preset | None, method: str) -> Setting:
    """A setting of a method, or of all (``""``)."""
    given = getattr(options, name)
    if preset is None and given is not None:
        return Setting(given, "given")
    if preset is None:
        chosen = METHODS[method].weight_decay if method and name == "weight_decay" else None
        if chosen is not None:
            return Setting(chosen, CHOSEN_ON_DIGITS)
        return Setting(_defaults(options.dataset)[name], "default")
    if name == "dataset":
        return Setting(given, f"given; the paper's is {preset.data or 'not printed'}")
    printed = {**preset.printed, **preset.rows.get(method, {})}
    if given is not None:
        return Setting(given, _given(name, printed))
    if name in printed:
        return Setting(printed[name], preset.places.get(name, preset.source))
    if name in preset.stand_ins:
        return Setting(preset.stand_ins[name], CHOSEN_HERE)
    return Setting(UNMENTIONED[name], "not mentioned; default")


def _check_learning_rate(options: Compare, preset: Preset | None) -> None:
    """Asks for the learning rate of an optimizer for which none was chosen."""
    if options.optimizer is None or options.lr is not None:
        return
    unasked = dataclasses.replace(options, optimizer=None)
    own, rate = (_setting(name, unasked, preset, "").value for name in ("optimizer", "lr"))
    if options.optimizer != own:
        raise UserError(
            f"--optimizer {options.optimizer}: the learning rate, {rate:g}, was chosen for {own}; "
            "give --lr (and consider --weight-decay)."
        )


def _defaults(dataset: str | None) -> Json:
    if dataset is None or dataset in ("digits", "mnist5k"):
        return DEFAULTS
    return OF_OTHERS


def _given(name: str, printed: Json) -> str:
    if name not in printed:
        return "given"
    paper = "the whole batch" if printed[name] is None else printed[name]
    return f"given; the paper's is {paper}"


def _hyperparameter(
    name: str, option: str, options: Compare, preset: Preset | None
) -> Setting | None:
    """The values of a hyperparameter (a tuple) with their source, if there are any."""
    given = getattr(getattr(options.hyperparameters, name), option)
    printed = preset.rows.get(name, {}) if preset else {}
    if given is not None:
        if not given:
            raise UserError(f"{option_flag(name, option)}: no value is given; give one or several.")
        return Setting(given, _given(option, printed))
    if preset and option in printed:
        return Setting((printed[option],), preset.source)
    default = METHODS[name].options[option].default
    if default is None:
        return None
    if preset is None:
        return Setting((default,), CHOSEN_ON_DIGITS)
    if option in (chosen := preset.stand_in_rows.get(name, {})):
        return Setting((chosen[option],), CHOSEN_HERE)
    function = getattr(sam_optax, name, None)
    known = inspect.signature(function).parameters.get(option) if function else None
    if known is not None and isinstance(known.default, int | float):
        return Setting((known.default,), f"default of sam_optax.{name}")
    if option not in METHODS[name].radius:
        return Setting((default,), CHOSEN_HERE)
    raise UserError(
        f"--preset {options.preset}: has no value of {option} for {name}; give "
        f"{option_flag(name, option)}."
    )


def _check_unused(options: Compare, used: set[str]) -> None:
    for name, method in METHODS.items():
        group = getattr(options.hyperparameters, name, None)
        given = [option for option in method.options if getattr(group, option) is not None]
        if given and name not in used:
            raise UserError(
                f"{option_flag(name, given[0])}: {name} is not trained; name it in --methods, "
                "or leave the option out."
            )


def _group_size(name: str, settings: Mapping[str, Setting]) -> Setting:
    """The setting m, where the whole batch is given by its size."""
    batch_size, (m, source) = settings["batch_size"].value, settings["m"]
    if m is None:
        return Setting(batch_size, f"{source} (the whole batch)")
    if not METHODS[name].groups and m != batch_size:
        return Setting(batch_size, f"{source}, but {name} has no groups (the whole batch)")
    if batch_size % m:
        divisor = next(d for d in range(min(m, batch_size), 0, -1) if batch_size % d == 0)
        raise UserError(
            f"--m {m}: does not divide the batch size, {batch_size}; use a number that does, such "
            f"as {divisor}."
        )
    return Setting(m, source)


def option_flag(name: str, option: str) -> str:
    """The name of a hyperparameter on the command line."""
    return f"{flag(name)}.{option.replace('_', '-')}"
