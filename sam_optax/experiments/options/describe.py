"""A run as plain data before it begins, with its data, for its results and for restoring it."""

import itertools

from sam_optax.experiments import named
from sam_optax.experiments.data.dataset import Dataset
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.options.declare import flag
from sam_optax.experiments.options.options import UNMENTIONED, Compare
from sam_optax.experiments.training.task import NOTHING, Entry, Given, entries_of, values
from sam_optax.experiments.types import Json, Record

_OF_LABELS = ("label_noise", "mixup", "label_smoothing")
_OF_PIXELS = ("crop", "flip", "cutout")


def describe(
    options: Compare, run: Json, dataset: Dataset, devices: int, given: Given = NOTHING
) -> Record:
    """What ``resolve`` returns, with what the data and objects from Python add.

    Raises:
      UserError: a batch is larger than the training set, devices cannot share it, or a setting has
        no effect on these data.
    """
    entries = entries_of(run)
    _check_effects(run, dataset, given)
    for entry in entries.values():
        _check_examples(entry, dataset, devices)
    examples = len(dataset.train.y)
    return {
        "settings": {**run["settings"], **_of_files(run, given)},
        "dataset": {
            "name": dataset.name,
            "train_examples": examples,
            "test_examples": len(dataset.test.y),
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


def _of_files(run: Json, given: Given) -> Record:
    """What tells the files that the run reads, and the objects from Python, from others."""
    models = [run["settings"]["model"]["value"]] * (given.model is None)
    digests = named.digests(models, [row["method"] for row in run["methods"]])
    found: Record = {k: {"value": of, "source": "of the file"} for k, of in digests.items() if of}
    objects = [of for of in ("model", "dataset", "loss") if getattr(given, of) is not None]
    if objects:
        found["from_python"] = {"value": objects, "source": "given"}
    if given.metric.of is not None:
        found["metric"] = {"value": given.metric.key, "source": "given"}
    return found


def _check_effects(run: Json, dataset: Dataset, given: Given) -> None:
    """Raises :class:`UserError` for a setting that has no effect on this network, data and loss."""
    settings = [values({**run["settings"], **method["settings"]}) for method in run["methods"]]
    optimizers, shape = {of["optimizer"] for of in settings}, dataset.shape
    for names, suits, what in (
        (["nesterov"], optimizers & {"sgd", "rmsprop"}, "--optimizer sgd and rmsprop"),
        (["beta2"], optimizers & {"adam", "adamw"}, "--optimizer adam and adamw"),
        (_OF_LABELS, not given.loss, "cross entropy, not a loss of yours"),
        (_OF_PIXELS, len(shape) > 2, f"images, not examples of shape {shape}"),
    ):
        for of, name in itertools.product([] if suits else settings, names):
            if of[name] != (without := UNMENTIONED[name]):
                raise UserError(f"{flag(name)} {of[name]}: is for {what}; give {without}.")


def _check_examples(entry: Entry, dataset: Dataset, devices: int) -> None:
    """Raises :class:`UserError` for a method that cannot share these examples."""
    examples, size = len(dataset.train.y), entry.recipe.batch_size
    if size > examples:
        raise UserError(f"--batch-size {size}: is more than the {examples} training examples.")
    if (m := entry.recipe.m) % devices:  # m divides the batch size
        given, what = (f"--m {m}", "group") if m < size else (f"--batch-size {size}", "batch")
        remedy = f"use a multiple of {devices}, or fewer --devices."
        raise UserError(f"{given}: {devices} devices share each {what}; {remedy}")
