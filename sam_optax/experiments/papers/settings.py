"""The settings of a run: the values, and where each of them is from."""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import sam_optax
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.papers.architectures import ARCHITECTURES
from sam_optax.experiments.papers.options import SUPPORTED, UNGROUPED, Train
from sam_optax.experiments.papers.presets import PRESETS, WHOLE_BATCH, Preset

NEUTRAL: dict[str, Any] = {
    "momentum": 0.9,
    "nesterov": False,
    "warmup_steps": 0,
    "clip": 0.0,
    "label_smoothing": 0.0,
    "label_noise": 0.0,
    "crop": 0,
    "flip": False,
    "cutout": 0,
    "mixup": 0.0,
    "image_size": 224,
    "m": WHOLE_BATCH,
}
"""Values of what neither a preset nor an option mentions."""

DEMONSTRATION: dict[str, Any] = {
    "dataset": "digits",
    "model": "tiny",
    "method": "sam",
    "epochs": 5,
    "batch_size": 64,
    "optimizer": "sgd",
    "lr": 0.1,
    "schedule": "cosine",
    "weight_decay": 5e-4,
    "rho": 0.05,
}
"""What is trained without a preset, unless options say otherwise."""

_SETTINGS = (
    "dataset",
    "model",
    "method",
    "epochs",
    "batch_size",
    "optimizer",
    "lr",
    "schedule",
    "weight_decay",
    *NEUTRAL,
)


class Setting(NamedTuple):
    """A value, and where it is from, in words."""

    value: Any
    source: str


@dataclasses.dataclass(frozen=True)
class Settings:
    """All settings of a run.

    Attributes:
      table: by name, in the order in which they are shown.
      preset: the preset, if any.
      hyperparameters: those of the method, by name; they are in ``table``, too.
    """

    table: Mapping[str, Setting]
    preset: Preset | None
    hyperparameters: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        """The value of a setting."""
        return self.table[name].value


def resolve(options: Train) -> Settings:
    """The settings that the options describe.

    Raises:
      UserError: an unknown preset, network or method, or a value that is missing or out of range.
    """
    preset = _preset(options)
    given = {name: getattr(options, name) for name in _SETTINGS if hasattr(options, name)}
    table = {name: _setting(name, given[name], preset) for name in _SETTINGS}
    _check(table)
    table["m"] = _group_size(table, options.m)
    method = table["method"].value
    same = preset is None or _known(preset).get("method") == method
    hyperparameters = {}
    for name in SUPPORTED[method].options:
        value = getattr(options.hyperparameters, name)
        setting = _hyperparameter(name, value, method, preset, same)
        kind = type(SUPPORTED[method].options[name].default)
        if kind is int and not (float(setting.value).is_integer() and setting.value < 2**31):
            raise UserError(f"{_flag(name)} {setting.value:g}: use an integer below 2^31.")
        hyperparameters[name] = kind(setting.value)
        table[name] = Setting(hyperparameters[name], setting.source)
    for name, value in vars(options.hyperparameters).items():
        if value is not None and name not in hyperparameters:
            raise UserError(
                f"{_flag(name)} {value:g}: {method} has no such hyperparameter; leave it out."
            )
    return Settings(table, preset, hyperparameters)


def _preset(options: Train) -> Preset | None:
    if options.preset is None:
        return None
    if options.preset not in PRESETS:
        known = ", ".join(PRESETS)
        raise UserError(f"--preset {options.preset}: unknown preset; use one of {known}.")
    preset = PRESETS[options.preset]
    if options.dataset is None:
        archive = "" if preset.data == "imagenet2012" else f"{preset.data}:PATH (its archive) or "
        raise UserError(
            f"--preset {options.preset}: needs the data; give --dataset {archive}"
            f"tfds:PATH (the folder of a version of {preset.data} that TFDS has prepared)."
        )
    return preset


def _known(preset: Preset) -> Mapping[str, Any]:
    return {**preset.stand_ins, **preset.printed}


def _setting(name: str, given: Any, preset: Preset | None) -> Setting:
    if name == "dataset" and preset is not None:
        return Setting(given, f"given; the paper's is {preset.data}")
    if given is not None:
        paper = "" if preset is None else _paper(name, preset)
        return Setting(given, f"given{paper}")
    if preset is not None and name in preset.printed:
        return Setting(preset.printed[name], preset.places.get(name, preset.source))
    if preset is not None and name in preset.stand_ins:
        return Setting(preset.stand_ins[name], "not printed; chosen here")
    if preset is None and name in DEMONSTRATION:
        return Setting(DEMONSTRATION[name], "default")
    return Setting(NEUTRAL[name], "default" if preset is None else "not mentioned; default")


def _paper(name: str, preset: Preset) -> str:
    return f"; the paper's is {preset.printed[name]}" if name in preset.printed else ""


def _hyperparameter(
    name: str, given: Any, method: str, preset: Preset | None, same: bool
) -> Setting:
    if given is not None:
        paper = _paper(name, preset) if preset is not None and same else ""
        return Setting(given, f"given{paper}")
    if preset is not None and same and name in _known(preset):
        return _setting(name, None, preset)
    if preset is None and method == DEMONSTRATION["method"] and name in DEMONSTRATION:
        return Setting(DEMONSTRATION[name], "default")
    function = getattr(sam_optax, method, None)
    default = inspect.signature(function).parameters.get(name) if function else None
    if default is not None and isinstance(default.default, int | float):
        return Setting(default.default, f"default of sam_optax.{method}")
    raise UserError(f"--method {method}: has no value for {name}; give {_flag(name)}.")


def _check(table: Mapping[str, Setting]) -> None:
    for name, known in _CHOICES.items():
        if (value := table[name].value) not in known:
            raise UserError(f"{_flag(name)} {value}: unknown; use one of {', '.join(known)}.")
    for name, (allowed, interval) in _RANGES.items():
        if not allowed(value := table[name].value):
            raise UserError(f"{_flag(name)} {value:g}: use a number {interval}.")


def _group_size(table: Mapping[str, Setting], given: int | None) -> Setting:
    """The setting m, in which the whole batch is its size."""
    method, batch_size = table["method"].value, table["batch_size"].value
    m, source = table["m"]
    if method in UNGROUPED and m not in (WHOLE_BATCH, batch_size):
        if given is not None:
            raise UserError(
                f"--m {m}: {method} would perturb all groups of examples alike; leave --m out, or "
                "choose another --method."
            )
        m, source = WHOLE_BATCH, f"the paper's is {m}, but {method} has no groups"
    if m == WHOLE_BATCH:
        return Setting(batch_size, f"{source} ({WHOLE_BATCH})")
    if m < 1 or batch_size % m:
        most = max(1, min(m, batch_size))
        divisor = next(d for d in range(most, 0, -1) if batch_size % d == 0)
        raise UserError(
            f"--m {m}: does not divide the batch size, {batch_size}; use a number that does, such "
            f"as {divisor}."
        )
    return table["m"]


_CHOICES: Mapping[str, Any] = {
    "model": ARCHITECTURES,
    "method": SUPPORTED,
    "optimizer": ("sgd", "adamw"),
    "schedule": ("cosine", "constant"),
}
_SHARE = (lambda v: 0 <= v < 1, "in [0, 1)")
_COUNT = (lambda v: v >= 0, "of at least 0")
_SOME = (lambda v: v >= 1, "of at least 1")
_FINITE = (lambda v: 0 <= v < float("inf"), "of at least 0")
_RANGES: Mapping[str, tuple[Any, str]] = {
    "epochs": _SOME,
    "batch_size": _SOME,
    "lr": (lambda v: 0 < v < float("inf"), "above 0"),
    "momentum": _SHARE,
    "warmup_steps": _COUNT,
    "weight_decay": _FINITE,
    "clip": _FINITE,
    "label_smoothing": _SHARE,
    "label_noise": _SHARE,
    "crop": _COUNT,
    "cutout": _COUNT,
    "mixup": _FINITE,
    "image_size": _SOME,
}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
