"""A run as plain data before it begins, with its data, for its results and for restoring it."""

import itertools

from sam_optax.experiments import named
from sam_optax.experiments.data.dataset import Dataset
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.options.declare import flag
from sam_optax.experiments.options.options import FIELDS, UNMENTIONED, Compare
from sam_optax.experiments.training import initial
from sam_optax.experiments.training.task import NOTHING, Entry, Given, entries_of, values
from sam_optax.experiments.types import Json, Record

_NEUTRAL = {**UNMENTIONED, "dtype": FIELDS["dtype"].default}
"""The values with which a setting has no effect."""
_OF_PIXELS = ("crop", "flip", "cutout")
_OF_LABELS = ("label_noise", "mixup", "label_smoothing")


def describe(
    options: Compare, run: Json, dataset: Dataset, devices: int, given: Given = NOTHING
) -> Record:
    """What ``resolve`` returns, with what the data and objects from Python add.

    Raises:
      UserError: a batch is larger than the training set, devices cannot share it, a method needs
        all examples but they stay on disk, or a setting has no effect on these data.
    """
    entries = entries_of(run)
    _check_effects(run, dataset, given)
    for entry in entries.values():
        _check_examples(entry, dataset, devices)
    examples = len(dataset.train.y)
    return {
        "settings": {**run["settings"], **_of_files(options, run, given)},
        "dataset": {
            "name": dataset.name,
            "train_examples": examples,
            "test_examples": len(dataset.test.y),
            "example_shape": list(dataset.shape),
            "classes": dataset.classes,
            "described": dataset.described,
            "sha256": dataset.sha256,
        },
        "metric": given.metric.record,
        "seeds": list(range(options.seed_offset, options.seed_offset + options.seeds)),
        "notes": [*run["notes"], *dataset.notes],
        "methods": [
            {
                **method,
                "epochs": entry.recipe.epochs,
                "batch_size": entry.recipe.batch_size,
                "steps_per_epoch": examples // entry.recipe.batch_size,
                "gradients": entry.variant.gradients(examples / entry.recipe.batch_size),
            }
            for method, entry in zip(run["methods"], entries.values(), strict=True)
        ],
    }


def _of_files(options: Compare, run: Json, given: Given) -> Record:
    """What tells the files that the run reads, and the objects from Python, from others."""
    found: Record = {}
    model = run["settings"]["model"]["value"]
    files = {"model": [model] * (given.model is None)}
    files["methods"] = [row["method"] for row in run["methods"]]
    for of, names in files.items():
        if sha256 := named.sha256(names, f"--{of}"):
            found[f"{of}_sha256"] = {"value": sha256, "source": "of the file"}
    objects = [of for of in ("model", "dataset", "loss") if getattr(given, of) is not None]
    if objects:
        found["from_python"] = {"value": objects, "source": "given"}
    if given.metric.of is not None:
        found["metric"] = {"value": given.metric.key, "source": "given"}
    if options.init:
        found["init_sha256"] = {"value": initial.sha256(options.init), "source": "of the file"}
    return found


def _check_effects(run: Json, dataset: Dataset, given: Given) -> None:
    """Raises :class:`UserError` for a setting that does not suit network, data and loss.

    (Unless it has the value without an effect.)
    """
    settings = [values({**run["settings"], **method["settings"]}) for method in run["methods"]]
    optimizers, why = {of["optimizer"] for of in settings}, {}
    instead = f"not {' or '.join(sorted(optimizers))}; leave it out"
    if not dataset.name.startswith("hf:"):
        why["image_size"] = f"needs --dataset hf:NAME_OR_PATH, not {dataset.name}; leave it out"
    if optimizers.isdisjoint(("sgd", "rmsprop")):
        why["nesterov"] = f"is for --optimizer sgd and rmsprop, {instead}"
    if optimizers.isdisjoint(("adam", "adamw")):
        why["beta2"] = f"is for --optimizer adam and adamw, {instead}"
    if given.model is not None or named.is_spec(settings[0]["model"]):
        why["dtype"] = "is for the built-in networks; set that of yours in its own code"
    if given.loss:
        why |= {name: f"is not for a loss of yours; give {_NEUTRAL[name]}" for name in _OF_LABELS}
    if len(dataset.shape) < 3:
        shape = f"is for images, not examples of shape {dataset.shape}"
        why |= {name: f"{shape}; give {_NEUTRAL[name]}" for name in _OF_PIXELS}
    for of, (name, reason) in itertools.product(settings, why.items()):
        if of[name] != _NEUTRAL[name]:
            raise UserError(f"{flag(name)} {of[name]}: {reason}.")


def _check_examples(entry: Entry, dataset: Dataset, devices: int) -> None:
    """Raises :class:`UserError` for a method that cannot share these examples."""
    examples, size, m = len(dataset.train.y), entry.recipe.batch_size, entry.recipe.m
    if entry.variant.method.needs_data and not dataset.resident:
        raise UserError(
            f"--methods {entry.method}: needs all training examples in memory, and those of "
            f"{dataset.name} stay on disk; leave it out."
        )
    if size > examples:
        raise UserError(
            f"--batch-size {size}: there are {examples} training examples; use at most as many."
        )
    for name, shared in {"batch_size": size, "m": m}.items():
        if shared % devices:
            what = "batch" if name == "batch_size" else "group of examples"
            raise UserError(
                f"{flag(name)} {shared}: {devices} devices share each {what}; use a multiple of "
                f"{devices}, or fewer --devices."
            )
