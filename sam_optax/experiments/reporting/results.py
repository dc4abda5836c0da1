"""The results of an experiment as plain data: their schema and their files.

``results.json`` has everything except the params, ``results.csv`` one line per method and seed,
``params.npz`` the trained variables.
"""

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
from typing import TYPE_CHECKING

import numpy as np

from sam_optax.experiments.errors import UserError
from sam_optax.experiments.reporting.schema import OF_METRIC, UNITS, Results, checked
from sam_optax.experiments.reporting.words import Score
from sam_optax.experiments.types import Json, PyTree, Record

if TYPE_CHECKING:
    from sam_optax.experiments.training.train import Outcome

FORMAT = "sam_optax.experiment"
FORMAT_VERSION = 2
CONFIDENCE = 0.95
BASES = ("sgd", "sam")
"""Methods with which the others are compared, seed by seed."""


def versions() -> dict[str, str]:
    """The environment of the numbers: library versions and the kind of device."""
    import jax

    import sam_optax

    found = {"sam_optax": sam_optax.__version__}
    found |= {name: metadata.version(name) for name in ("jax", "optax", "flax", "numpy")}
    return found | {"python": platform.python_version(), "device": jax.devices()[0].device_kind}


def number(value: object) -> float | None:
    """A number that JSON can hold: the shortest decimal of a float32; ``None`` if not finite."""
    value = float(str(value))
    return value if math.isfinite(value) else None


def summary(values: np.ndarray) -> dict[str, float | None]:
    """Mean, sample standard deviation, and half the confidence interval of the mean.

    ``None`` where there are not enough values.
    """
    from scipy import stats  # takes its time

    wide = np.asarray(values, np.float64)
    if len(wide) < 2:
        return {"mean": number(wide[0]) if len(wide) else None, "std": None, "interval": None}
    std = wide.std(ddof=1)
    half = stats.t.ppf((1 + CONFIDENCE) / 2, len(wide) - 1) * std / np.sqrt(len(wide))
    return {"mean": number(wide.mean()), "std": number(std), "interval": number(half)}


def gain(ours: Json, theirs: Json, key: str) -> dict[str, float | None]:
    """What a method gains over another, in the seeds in which neither diverged."""
    pairs = [
        (a[key], b[key])
        for a, b in zip(ours["seeds"], theirs["seeds"], strict=True)
        if not (a["diverged"] or b["diverged"])
    ]
    return summary(np.array([a - b for a, b in pairs]))


def differences(method: Json, methods: Sequence[Json], score: Score) -> Record:
    """The difference of a method's score to that of each of ``BASES``.

    Of a base that is trained at several radii, the one with the best mean score counts.
    """
    found: Record = {}
    for base in BASES:
        rows = [row for row in methods if row["method"] == base != method["method"]]
        if rows:
            best, key = max(rows, key=score.rank), score.key
            keys = (of for of in (key, f"best_{key}", f"tuned_{key}") if of in best["seeds"][0])
            gains = {of: gain(method, best, of) for of in keys}
            found[base] = {"to": best["name"], **gains}
    return found


def collect(description: Json, parameters: int, outcomes: Mapping[str, "Outcome"]) -> Record:
    """The results of a run from the outcomes of its methods; NaN becomes ``None``.

    A seed has diverged if its final training loss is not finite; summaries are over the others.
    """
    seeds, score = description["seeds"], Score.of(description)
    methods = [
        {**method, **_of_method(method, seeds, outcomes[method["name"]], score)}
        for method in description["methods"]
    ]
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        **description,
        "parameters": parameters,
        "units": UNITS if score.is_accuracy else UNITS | {score.key: OF_METRIC},
        "versions": versions(),
        "methods": [{**row, "differences": differences(row, methods, score)} for row in methods],
    }


def _of_method(method: Json, seeds: list[int], outcome: "Outcome", score: Score) -> Record:
    curve, higher = outcome.curves[score.key], score.higher_is_better
    scores = (score.key, "test_top5_accuracy")
    known = {name: outcome.curves[name] for name in scores if name in outcome.curves}
    best, where = (np.nanmax, np.nanargmax) if higher else (np.nanmin, np.nanargmin)
    finals = {
        **{name: of[-1] for name, of in known.items()},
        **{f"best_{name}": best(of, axis=0) for name, of in known.items()},
        "train_loss": outcome.curves["train_loss"][-1],
        "sharpness": outcome.sharpness,
    }
    if "tune" in method:
        finals[f"tuned_{score.key}"] = curve[method["tune"]["epoch"] - 1]
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
                "best_epoch": int(where(curve[:, i])) + 1,
                "curves": {
                    name: [number(value) for value in values[:, i]]
                    for name, values in outcome.curves.items()
                },
            }
            for i, seed in enumerate(seeds)
        ],
    }


def to_json(results: Json) -> bytes:
    """All results as JSON; undecodable bytes of a path are escaped."""
    text = json.dumps(results, indent=1, allow_nan=False, ensure_ascii=False)
    return (text + "\n").encode(errors="backslashreplace")


def from_json(path: Path) -> Record | None:
    """Reads the output of :func:`to_json`, if any; fields that older runs lack get defaults.

    Raises:
      UserError: the file is of another version, or a field is not what it should be.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict):
        return None
    kind, version = found.get("format"), found.get("format_version", 1)
    if kind not in (FORMAT, "sam_optax.compare"):
        return None
    if (kind, version) != (FORMAT, FORMAT_VERSION):
        raise UserError(
            f"{path}: has format {kind} {version} of another version of sam_optax, not {FORMAT} "
            f"{FORMAT_VERSION}; use that version, or train again."
        )
    known = checked(path, found, Results)
    pairs = zip(known["methods"], found["methods"], strict=True)
    return {**known, **found, "methods": [{**ours, **theirs} for ours, theirs in pairs]}


def to_csv(results: Json) -> bytes:
    """One line per method and seed; fields of non-finite numbers are empty."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    measures = [*results["methods"][0]["summary"], "best_epoch"]
    writer.writerow(["method", "seed", *measures, "diverged", "step_cost"])
    for method in results["methods"]:
        for seed in method["seeds"]:
            numbers = [seed.get(key) for key in measures]
            diverged = int(seed["diverged"])
            writer.writerow([method["name"], seed["seed"], *numbers, diverged, method["step_cost"]])
    return file.getvalue().encode()


def params_to_npz(params: Mapping[str, Mapping[int, PyTree]]) -> bytes:
    """Trained variables, by method and seed: arrays named ``method/seed/collection/path``."""
    import flax.traverse_util

    flat = flax.traverse_util.flatten_dict(dict(params)).items()
    arrays: Record = {"/".join(map(str, path)): np.asarray(leaf) for path, leaf in flat}
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def load_params(path: str | Path, start: str = "") -> dict[str, dict[int, PyTree]]:
    """Reads the arrays whose names begin with ``start`` from the output of :func:`params_to_npz`.

    A damaged file raises :class:`UserError`.
    """
    import flax.traverse_util

    flat = {}
    try:
        with open(path, "rb") as file, np.load(file) as archive:
            for key in (key for key in archive.files if key.startswith(start)):
                name, seed, *leaf = key.split("/")
                flat[name, int(seed), *leaf] = archive[key]
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path}: is damaged ({error}); train again with --out.") from error
    return flax.traverse_util.unflatten_dict(flat)
