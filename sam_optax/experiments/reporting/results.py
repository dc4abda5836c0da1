"""The results of an experiment as plain data: their schema, and the files that hold them.

``results.json`` has everything but the params, ``results.csv`` a line for each method and seed,
``params.npz`` the trained variables.
"""

import csv
import io
import json
import math
import platform
import zipfile
import zlib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sam_optax.experiments.errors import UserError

if TYPE_CHECKING:
    from sam_optax.experiments.training.train import Outcome

FORMAT = "sam_optax.experiment"
FORMAT_VERSION = 1
MEASURES = ("test_accuracy", "best_test_accuracy", "train_loss", "sharpness")
UNITS = {
    "test_accuracy": "share of the test examples, which have clean labels, after the last epoch",
    "best_test_accuracy": "the highest test accuracy after an epoch",
    "train_loss": "nats, mean over the training set, on the labels trained on",
    "sharpness": "nats, L(w + eps) - L(w) on training examples, eps of SAM at sharpness_rho",
    "ascent_norm": "norm of the ascent gradient in a step after each epoch",
    "sharp_norm": "norm of the sharp gradient in that step",
    "eps_norm": "norm of the perturbation in that step",
    "cosine": "cosine of both gradients in that step",
    "loss_rise": "nats, L(w + eps) - L(w) on the batch of that step, null where not known",
    "gradients": "gradients on a batch per step",
    "step_cost": "time of a training step relative to SGD, median over interleaved epochs",
    "epoch_seconds": "seconds, training steps of one epoch of all seeds, median",
    "compile_seconds": "seconds to compile the training step",
    "examples_per_second": "training examples per second, of all seeds",
}


def versions() -> dict[str, str]:
    """What else the numbers depend on: versions of libraries and the kind of device."""
    import jax

    import sam_optax

    libraries = {name: metadata.version(name) for name in ("jax", "optax", "flax", "numpy")}
    return {
        "sam_optax": sam_optax.__version__,
        **libraries,
        "python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
    }


def number(value: Any) -> float | None:
    """A number that JSON can hold: the shortest decimal of a float32; ``None`` if not finite."""
    value = float(str(value))
    return value if math.isfinite(value) else None


def summary(values: np.ndarray) -> dict[str, float | None]:
    """Mean and sample standard deviation, where there are enough values for them."""
    wide = np.asarray(values, np.float64)
    return {
        "mean": number(wide.mean()) if len(wide) else None,
        "std": number(wide.std(ddof=1)) if len(wide) > 1 else None,
    }


def collect(
    description: Mapping[str, Any], parameters: int, outcomes: Mapping[str, "Outcome"]
) -> dict[str, Any]:
    """The results of a run from what became of its methods; NaN becomes ``None``.

    A seed has diverged if its final training loss is not finite; summaries are over the others.
    """
    seeds = description["seeds"]
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        **description,
        "parameters": parameters,
        "units": UNITS,
        "versions": versions(),
        "methods": [
            {**method, **_of_method(method, seeds, outcomes[method["name"]])}
            for method in description["methods"]
        ],
    }


def _of_method(method: Mapping[str, Any], seeds: list[int], outcome: "Outcome") -> dict[str, Any]:
    accuracy = outcome.curves["test_accuracy"]
    finals = {
        "test_accuracy": accuracy[-1],
        "best_test_accuracy": np.nanmax(accuracy, axis=0),
        "train_loss": outcome.curves["train_loss"][-1],
        "sharpness": outcome.sharpness,
    }
    finite = np.isfinite(finals["train_loss"])
    seconds = float(np.median(outcome.seconds))
    examples = method["steps_per_epoch"] * method["batch_size"] * len(seeds)
    return {
        "step_cost": number(outcome.cost),
        "epoch_seconds": seconds,
        "compile_seconds": outcome.compile_seconds,
        "examples_per_second": examples / seconds,
        "diverged": int(np.sum(~finite)),
        "summary": {key: summary(values[finite]) for key, values in finals.items()},
        "seeds": [
            {
                "seed": seed,
                "diverged": not finite[i].item(),
                **{key: number(values[i]) for key, values in finals.items()},
                "best_epoch": int(np.nanargmax(accuracy[:, i])) + 1,
                "curves": {
                    name: [number(value) for value in values[:, i]]
                    for name, values in outcome.curves.items()
                },
            }
            for i, seed in enumerate(seeds)
        ],
    }


def to_json(results: Mapping[str, Any]) -> bytes:
    """All of the results. What is not text in a path becomes an escape, as JSON writes it."""
    text = json.dumps(results, indent=1, allow_nan=False, ensure_ascii=False)
    return (text + "\n").encode(errors="backslashreplace")


def from_json(path: Path) -> dict[str, Any] | None:
    """What :func:`to_json` wrote, if it is there; another version's raises :class:`UserError`."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict):
        return None
    kind, version = found.get("format"), found.get("format_version")
    if (kind, version) == (FORMAT, FORMAT_VERSION):
        return found
    if kind == FORMAT or kind == "sam_optax.compare" or {"identity", "points"} <= found.keys():
        raise UserError(
            f"{path}: has format {kind or 'sam_optax.train'} {version or 1} of another version of "
            f"sam_optax, not {FORMAT} {FORMAT_VERSION}; use that version, or train again."
        )
    return None


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


def params_to_npz(params: Mapping[str, Mapping[int, Any]]) -> bytes:
    """Trained variables, by method and seed: arrays named ``method/seed/collection/path``."""
    import flax.traverse_util

    arrays = {
        f"{name}/{seed}/{path}": np.asarray(leaf)
        for name, runs in params.items()
        for seed, variables in runs.items()
        for path, leaf in flax.traverse_util.flatten_dict(variables, sep="/").items()
    }
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]  # the other keywords have no slash
    return file.getvalue()


def load_params(path: str | Path) -> dict[str, dict[int, Any]]:
    """Reads what :func:`params_to_npz` wrote; a damaged file raises :class:`UserError`."""
    import flax.traverse_util

    methods: dict[str, dict[int, dict[str, Any]]] = {}
    try:
        with open(path, "rb") as file, np.load(file) as archive:
            for key in archive.files:
                name, seed, leaf = key.split("/", 2)
                methods.setdefault(name, {}).setdefault(int(seed), {})[leaf] = archive[key]
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path}: is damaged ({error}); train again with --out.") from error
    return {
        name: {
            seed: flax.traverse_util.unflatten_dict(flat, sep="/") for seed, flat in runs.items()
        }
        for name, runs in methods.items()
    }
