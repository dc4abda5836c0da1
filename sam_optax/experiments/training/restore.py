"""From the description of a run to its task: data, network and recipes."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from sam_optax.experiments.data.dataset import Dataset, load
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.methods.method import Variant
from sam_optax.experiments.methods.registry import METHODS
from sam_optax.experiments.networks import registry
from sam_optax.experiments.training.task import Entry, Recipe, Task

_LOADING = ("image_column", "label_column", "test_split", "image_size")


def load_dataset(settings: Mapping[str, Any]) -> Dataset:
    """All examples of the data set that settings (values by name) describe."""
    return load(settings["dataset"], **{name: settings.get(name) for name in _LOADING})


def task_of(description: Mapping[str, Any], dataset: Dataset) -> Task:
    """The task that a description describes, on the examples in use."""
    settings = _values(description["settings"])
    model = registry.build(
        settings["model"], dataset.shape, dataset.classes, jnp.dtype(settings["dtype"])
    )
    entries = {}
    for found in description["methods"]:
        values = {**settings, **_values(found["settings"])}
        recipe = Recipe(**{name: values[name] for name in Recipe.__dataclass_fields__})
        variant = Variant(METHODS[found["method"]], found["hyperparameters"])
        if variant.method.needs_data and not dataset.resident:
            raise UserError(
                f"--methods {found['method']}: needs all training examples in memory, and those of "
                f"{dataset.name} stay on disk; leave the method out."
            )
        entries[found["name"]] = Entry(found["method"], variant, recipe)
    return Task(
        dataset=dataset,
        model=model,
        seeds=tuple(description["seeds"]),
        label_noise=settings["label_noise"],
        sharpness_rho=settings["sharpness_rho"],
        entries=entries,
    )


def restore(results: Mapping[str, Any]) -> Task:
    """The task of a run, whose data must be what they were.

    Raises:
      UserError: the data have changed since the run, or are gone.
    """
    settings = _values(results["settings"])
    dataset = load_dataset(settings).some(settings["scale"])
    if dataset.sha256 != results["dataset"]["sha256"]:
        raise UserError(
            f"{dataset.name}: its contents have changed since the run; the trained params no "
            "longer belong to it."
        )
    return task_of(results, dataset)


def _values(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: found["value"] for name, found in settings.items()}
