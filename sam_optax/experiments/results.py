"""The results of a comparison as data: summaries, JSON, CSV and arrays."""

import csv
import io
import json
import math
import platform
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import numpy as np

import sam_optax
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.task import Task
from sam_optax.experiments.training import Outcome

FORMAT = "sam_optax.compare"
FORMAT_VERSION = 1
MEASURES = ("test_accuracy", "train_loss", "sharpness")
UNITS = {
    "test_accuracy": "share of the test examples, which have clean labels",
    "train_loss": "nats, mean over the training set, on the labels trained on",
    "sharpness": "nats, L(w + eps) - L(w) on the training set, eps of SAM at sharpness_rho",
    "ascent_norm": "norm of the ascent gradient in a step after each epoch (with --out)",
    "sharp_norm": "norm of the sharp gradient in that step",
    "eps_norm": "norm of the perturbation in that step",
    "cosine": "cosine of both gradients in that step",
    "loss_rise": "nats, L(w + eps) - L(w) on the batch of that step, null where not known",
    "step_cost": "time of a training step relative to SGD, median over interleaved epochs",
    "epoch_seconds": "seconds, training steps of one epoch of all seeds, median",
}


def collect(task: Task, settings: Mapping[str, Any], outcomes: Mapping[str, Outcome]) -> dict:
    """Everything but the params, as plain data that JSON can hold (NaN becomes ``None``).

    A seed has diverged if its final training loss is not finite; summaries are over the others.
    """
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "settings": dict(settings),
        "dataset": {
            "name": task.dataset.name,
            "train_examples": len(task.dataset.x_train),
            "test_examples": len(task.dataset.x_test),
            "example_shape": list(task.dataset.x_train.shape[1:]),
            "classes": task.dataset.classes,
            "sha256": task.dataset.sha256,
        },
        "seeds": list(task.seeds),
        "steps_per_epoch": task.steps_per_epoch,
        "units": UNITS,
        "versions": versions(),
        "methods": [_method(name, task.seeds, o) for name, o in outcomes.items()],
    }


def versions() -> dict[str, str]:
    """What else the numbers depend on: versions of libraries and the kind of device."""
    libraries = {name: metadata.version(name) for name in ("jax", "optax", "flax", "numpy")}
    return {
        "sam_optax": sam_optax.__version__,
        **libraries,
        "python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
    }


def _method(name: str, seeds: Sequence[int], outcome: Outcome) -> dict[str, Any]:
    finals = {
        "test_accuracy": outcome.test_accuracy[-1],
        "train_loss": outcome.train_loss[-1],
        "sharpness": outcome.sharpness,
    }
    finite = np.isfinite(finals["train_loss"])
    return {
        "name": name,
        "hyperparameters": outcome.hyperparameters,
        "step_cost": outcome.cost,
        "epoch_seconds": float(np.median(outcome.seconds)),
        "diverged": int(np.sum(~finite)),
        "summary": {key: _summary(values[finite]) for key, values in finals.items()},
        "seeds": [
            {
                "seed": seed,
                "diverged": not finite[i].item(),
                **{key: _number(values[i]) for key, values in finals.items()},
                "curves": {
                    "test_accuracy": [_number(v) for v in outcome.test_accuracy[:, i]],
                    "train_loss": [_number(v) for v in outcome.train_loss[:, i]],
                    **{
                        key: [_number(v) for v in values[:, i]]
                        for key, values in outcome.watched.items()
                    },
                },
            }
            for i, seed in enumerate(seeds)
        ],
    }


def _summary(values: np.ndarray) -> dict[str, float | None]:
    """Mean and sample standard deviation, where there are enough values for them."""
    wide = values.astype(np.float64)
    return {
        "mean": _number(wide.mean()) if len(wide) else None,
        "std": _number(wide.std(ddof=1)) if len(wide) > 1 else None,
    }


def _number(value: Any) -> float | None:
    value = float(str(value))  # the shortest decimal that is this float32
    return value if math.isfinite(value) else None


def to_json(results: Mapping[str, Any]) -> bytes:
    """The whole of the results."""
    return (json.dumps(results, indent=1, allow_nan=False) + "\n").encode()


def from_json(path: Path) -> dict[str, Any] | None:
    """Reads what :func:`to_json` wrote; ``None`` if there is nothing of the kind."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    kind = (FORMAT, FORMAT_VERSION)
    if not isinstance(found, dict) or (found.get("format"), found.get("format_version")) != kind:
        return None
    return found


def to_csv(results: Mapping[str, Any]) -> bytes:
    """One line for each method and seed; a field is empty where the number is not finite."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["method", "seed", *MEASURES, "diverged", "step_cost"])
    for method in results["methods"]:
        for seed in method["seeds"]:
            numbers = [seed[key] for key in MEASURES]
            diverged = int(seed["diverged"])
            writer.writerow([method["name"], seed["seed"], *numbers, diverged, method["step_cost"]])
    return file.getvalue().encode()


def params_to_npz(seeds: Sequence[int], outcomes: Mapping[str, Outcome]) -> bytes:
    """Final params: one array for each ``method/seed/path/of/leaf``."""
    arrays = {}
    for name, outcome in outcomes.items():
        for i, seed in enumerate(seeds):
            flat = flax.traverse_util.flatten_dict(outcome.params, sep="/")
            arrays.update({f"{name}/{seed}/{path}": leaf[i] for path, leaf in flat.items()})
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def load_params(path: str | Path) -> dict[str, dict[int, Any]]:
    """Reads what :func:`params_to_npz` wrote: method -> seed -> params.

    Raises:
      UserError: the file is damaged.
    """
    methods: dict[str, dict[int, dict[str, Any]]] = {}
    try:
        with open(path, "rb") as file, np.load(file) as archive:
            for key in archive.files:
                name, seed, leaf = key.split("/", 2)
                methods.setdefault(name, {}).setdefault(int(seed), {})[leaf] = archive[key]
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path}: is damaged ({error}); train again with compare --out.") from error
    return {
        name: {
            seed: flax.traverse_util.unflatten_dict(flat, sep="/") for seed, flat in runs.items()
        }
        for name, runs in methods.items()
    }
