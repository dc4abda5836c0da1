"""A run as plain data before it begins, for its results and for restoring it."""

import dataclasses
import math
from collections.abc import Mapping

from sam_optax.experiments.data.dataset import Dataset
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.methods.registry import METHODS
from sam_optax.experiments.networks import own
from sam_optax.experiments.options.declare import flag
from sam_optax.experiments.options.options import DEFAULTS, Compare
from sam_optax.experiments.options.resolve import (
    CHOSEN_ON_DIGITS,
    Resolved,
    Row,
    Setting,
    option_flag,
)
from sam_optax.experiments.reporting.words import plain
from sam_optax.experiments.training import initial
from sam_optax.experiments.training.task import ACCURACY, NOTHING, Given
from sam_optax.experiments.types import Record

_OF_OPTIONS = ("scale", "dtype", "seeds", "seed_offset")
_WHERE_GIVEN: tuple[str, ...] = ("preset", "tune", "tune_lr", "trials", "save_every", "init")
_WHERE_GIVEN += ("image_column", "label_column", "test_split")
_OF_OPTIMIZERS = {"nesterov": ("sgd", "rmsprop"), "beta2": ("adam", "adamw")}
_OF_PIXELS = ("crop", "flip", "cutout")
_OF_LABELS = ("label_noise", "mixup", "label_smoothing")


def shared_settings(options: Compare, resolved: Resolved) -> dict[str, Setting]:
    """The settings that all methods share, which determine data and network."""
    found = {}
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        source = "default" if value == field.default else "given"
        if field.name in _OF_OPTIONS or (field.name in _WHERE_GIVEN and source == "given"):
            found[field.name] = Setting(value, source)
    return {**resolved.shared, **found}


def planned(options: Compare, resolved: Resolved) -> Record:
    """What of a run is known without its data, for ``--dry-run``."""
    rows = {name: row.settings for name, row in resolved.rows.items()}
    common = _common(rows)
    shared = {**shared_settings(options, resolved), **common}
    notes = resolved.preset.differs if resolved.preset else ()
    return {
        "settings": {name: setting._asdict() for name, setting in shared.items()},
        "methods": [_of_method(name, resolved, rows, common) for name in rows],
        "notes": [*_choices(resolved, rows), *notes],
    }


def _of_method(
    name: str,
    resolved: Resolved,
    rows: Mapping[str, Mapping[str, Setting]],
    common: Mapping[str, Setting],
) -> Record:
    """A method with its hyperparameters, and its settings that are not common to all."""
    row = resolved.rows[name]
    return {
        "name": name,
        "method": row.method,
        "title": METHODS[row.method].title,
        "hyperparameters": {  # JSON has no infinity
            option: str(value) if value == math.inf else value
            for option, value in row.variant.hyperparameters.items()
        },
        "sources": dict(row.sources),
        "settings": {k: v._asdict() for k, v in rows[name].items() if k not in common},
    }


def _common(rows: Mapping[str, Mapping[str, Setting]]) -> dict[str, Setting]:
    """The settings that are the same for all methods."""
    first = next(iter(rows.values()))
    return {
        name: setting
        for name, setting in first.items()
        if all(row[name].value == setting.value for row in rows.values())
    }


def describe(
    options: Compare,
    resolved: Resolved,
    dataset: Dataset,
    full: Mapping[str, int],
    devices: int,
    given: Given = NOTHING,
) -> Record:
    """The run as data, on the examples in use; ``full`` counts those before ``--scale``.

    Raises:
      UserError: a batch is larger than the training set, devices cannot share it, a method needs
        all examples but they stay on disk, or an option has no effect on these data.
    """
    spec = dataset.name
    if options.image_size and not spec.startswith("hf:"):
        raise UserError(
            f"--image-size {options.image_size}: needs --dataset hf:NAME_OR_PATH, not {spec}; "
            "leave it out."
        )
    optimizers = {row.settings["optimizer"].value for row in resolved.rows.values()}
    for name, kinds in _OF_OPTIMIZERS.items():
        if (value := getattr(options, name)) and not optimizers.intersection(kinds):
            raise UserError(
                f"{flag(name)} {value}: is for --optimizer {' and '.join(kinds)}, not "
                f"{' or '.join(sorted(optimizers))}; leave it out."
            )
    for row in resolved.rows.values():
        if METHODS[row.method].needs_data and not dataset.resident:
            raise UserError(
                f"--methods {row.method}: needs all training examples in memory, and those of "
                f"{spec} stay on disk; leave it out."
            )
        settings = {**resolved.shared, **row.settings}
        for setting in _OF_LABELS if given.loss else ():
            if value := settings[setting].value:
                raise UserError(
                    f"{flag(setting)} {value}: is not for a loss of yours; give {type(value)()}."
                )
        for setting in _OF_PIXELS if len(dataset.shape) < 3 else ():
            if value := settings[setting].value:
                raise UserError(
                    f"{flag(setting)} {value}: is for images, not examples of shape "
                    f"{dataset.shape}; give {type(value)()}."
                )
    model = resolved.shared["model"].value
    in_file = given.model is None and own.is_spec(model)
    if (given.model is not None or in_file) and options.dtype != "float32":
        raise UserError(
            f"--dtype {options.dtype}: is for the built-in networks; set the dtype of yours in its "
            "own code, and leave it out."
        )
    rows = {
        name: _extent(row, options, len(dataset.train.y), full["train"], devices)
        for name, row in resolved.rows.items()
    }
    common = _common(rows)
    shared = {**shared_settings(options, resolved), **common}
    if in_file:
        shared["model_sha256"] = Setting(own.sha256(model), "of the file")
    if given.objects:
        shared["from_python"] = Setting(given.objects, "given")
    if given.metric is not ACCURACY:
        shared["metric"] = Setting(given.metric.key, "given")
    if options.init:
        shared["init_sha256"] = Setting(initial.sha256(options.init), "of the file")
    elif resolved.preset and resolved.preset.init:
        raise UserError(
            f"--preset {options.preset}: starts from pretrained params; give --init FILE, "
            f"{resolved.preset.init}."
        )
    return {
        "settings": {name: setting._asdict() for name, setting in shared.items()},
        "dataset": {
            "name": dataset.name,
            "train_examples": len(dataset.train.y),
            "test_examples": len(dataset.test.y),
            "example_shape": list(dataset.shape),
            "classes": dataset.classes,
            "described": dataset.described,
            "sha256": dataset.sha256,
        },
        "metric": given.metric.record,
        "seeds": list(range(options.seed_offset, options.seed_offset + options.seeds)),
        "notes": _notes(options, resolved, dataset, full, rows),
        "methods": [
            {
                **_of_method(name, resolved, rows, common),
                "epochs": rows[name]["epochs"].value,
                "batch_size": rows[name]["batch_size"].value,
                "steps_per_epoch": len(dataset.train.y) // rows[name]["batch_size"].value,
                "gradients": row.variant.gradients(
                    len(dataset.train.y) / rows[name]["batch_size"].value
                ),
            }
            for name, row in resolved.rows.items()
        ],
    }


def _extent(
    row: Row, options: Compare, examples: int, full: int, devices: int
) -> dict[str, Setting]:
    """The settings of a method, scaled down by ``--scale``."""
    settings = dict(row.settings)
    scale, asked, m = options.scale, settings["batch_size"].value, settings["m"].value
    if scale == 1 and asked > examples:
        raise UserError(
            f"--batch-size {asked}: there are {examples} training examples; use at most as many."
        )
    share = devices * (asked // m)
    size = asked if asked <= examples else max(1, examples // share) * share
    if size > examples:
        raise UserError(
            f"--scale {scale:g}: leaves {examples} training examples, too few for {devices} "
            f"devices and {asked // m} groups (--m); use a larger scale or --devices 1."
        )
    if size % devices:
        raise UserError(
            f"--batch-size {size}: {devices} devices share each batch; use a multiple of "
            f"{devices}, or fewer --devices."
        )
    if (m := size // (asked // m)) % devices:
        raise UserError(
            f"--m {m}: {devices} devices share each group of examples; use a multiple of {devices} "
            f"that divides the batch size, {size}, or fewer --devices."
        )
    epochs = max(1, round(scale * settings["epochs"].value))
    warmup = settings["warmup_steps"].value
    if scale < 1:  # the same share of the steps
        steps = settings["epochs"].value * (full // min(asked, full))
        warmup = round(warmup * epochs * (examples // size) / steps)
    values = {"epochs": epochs, "batch_size": size, "m": m, "warmup_steps": warmup}
    for name, value in values.items():
        then, source = settings[name]
        if value != then:
            settings[name] = Setting(value, f"{source}; scaled down from {then:,}")
    return settings


def _notes(
    options: Compare,
    resolved: Resolved,
    dataset: Dataset,
    full: Mapping[str, int],
    rows: Mapping[str, Mapping[str, Setting]],
) -> list[str]:
    """Notes for the reader: values chosen here, scaling, and differences from the paper."""
    notes = _choices(resolved, rows)
    if options.scale < 1:
        notes.append(
            f"Scaled down (--scale {options.scale:g}): {len(dataset.train.y):,} of "
            f"{full['train']:,} training examples, {len(dataset.test.y):,} of {full['test']:,} "
            "test examples. Do not compare the accuracy with the paper's."
        )
    theirs = {  # methods whose radius was chosen elsewhere
        row.method: METHODS[row.method].radius[0]
        for row in resolved.rows.values()
        if {row.sources[option] for option in METHODS[row.method].radius} == {CHOSEN_ON_DIGITS}
    }
    here = {"dataset": dataset.name} | {
        n: resolved.shared[n].value for n in ("label_noise", "model")
    }
    if options.tune:
        notes.append(
            "--tune: radii, weight decays and stopping epochs are chosen on a fifth of the "
            "training examples, held out with the labels trained on, from seeds of their own."
        )
    elif theirs and any(value != DEFAULTS[name] for name, value in here.items()):
        method, option = next(iter(theirs.items()))
        given = f"{option_flag(method, option)} {METHODS[method].options[option].default / 2:g}"
        notes.append(
            f"The radii and weight decays of {', '.join(theirs)} were chosen on digits with 40 % "
            "wrong labels, for the mlp, and this task may need others: add --tune, which chooses "
            f"them on held-out examples, or give them, as in {given}."
        )
    return [*notes, *dataset.notes, *(resolved.preset.differs if resolved.preset else ())]


def _choices(resolved: Resolved, rows: Mapping[str, Mapping[str, Setting]]) -> list[str]:
    """A note of the values that are not printed in a preset's paper."""
    chosen = [
        f"{name} {setting.value}"
        for settings in (resolved.shared, *rows.values())
        for name, setting in settings.items()
        if setting.source.startswith("not printed")
    ]
    chosen += [
        f"{row.method}'s {name} {plain(row.variant.hyperparameters[name])}"
        for row in resolved.rows.values()
        for name, source in row.sources.items()
        if source.startswith("not printed")
    ]
    values = ", ".join(dict.fromkeys(chosen))
    return [f"Not printed in the paper, chosen here: {values}."] if chosen else []
