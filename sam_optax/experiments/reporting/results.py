"""The results of an experiment as plain data, and ``results.json``, which has them all."""

import contextlib
import json
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import jax
import numpy as np

import sam_optax
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.reporting.words import Score
from sam_optax.experiments.training.runner import Outcome
from sam_optax.experiments.types import Json, Record

FORMAT, FORMAT_VERSION = "sam_optax.experiment", 2
UNITS = {
    "tuned_test_accuracy": "score after the epoch that --tune chose on held-out examples",
    "held_out": "score on the held-out examples, with labels as trained on, by seed",
    "best_test_accuracy": "the best after an epoch, chosen on the test examples: optimistic",
    "interval": "half the width of a mean's 95 % confidence interval, Student's t",
    "differences": "to sgd, and to the sam with the best mean score, seed by seed",
    "train_loss": "mean over the training set, on the labels trained on; nats, or of your loss",
    "sharpness": "L(w + eps) - L(w) on training examples, eps of SAM at sharpness_rho",
    "gradients": "gradients on a batch per step",
    "step_cost": "time of a training step relative to SGD, median over interleaved epochs",
    "epoch_seconds": "seconds, training steps of one epoch of all seeds, median",
    "compile_seconds": "seconds to compile the training step",
}
"""What each number is, besides the score after the last epoch, see ``words.Score``."""


def versions() -> dict[str, str]:
    """The environment of the numbers: library versions and the kind of device."""
    found = {"sam_optax": sam_optax.__version__}
    found |= {name: metadata.version(name) for name in ("jax", "optax", "flax", "numpy")}
    return found | {"python": platform.python_version(), "device": jax.devices()[0].device_kind}


def number(value: object) -> float | None:
    """A number that JSON can hold: the shortest decimal of a float32; ``None`` if not finite."""
    value = float(str(value))
    return value if math.isfinite(value) else None


def summary(values: np.ndarray) -> dict[str, float | None]:
    """Mean, sample standard deviation, and half the 95 % confidence interval of the mean.

    ``None`` where there are not enough values.
    """
    from scipy import stats  # takes its time

    wide, count = np.asarray(values, np.float64), len(values)
    if count < 2:
        return {"mean": number(wide[0]) if count else None, "std": None, "interval": None}
    half = stats.t.ppf(0.975, count - 1) * stats.sem(wide)
    return {"mean": number(wide.mean()), "std": number(wide.std(ddof=1)), "interval": number(half)}


def _differences(method: Json, methods: Sequence[Json], score: Score) -> Record:
    """The difference of a method's score to that of SGD and of SAM, as far as they are there.

    It is over the seeds in which neither diverged. Of a base that is trained at several radii, the
    one with the best mean score counts.
    """
    found: Record = {}
    for base in ("sgd", "sam"):
        rows = [row for row in methods if row["method"] == base != method["method"]]
        if rows:
            best = max(rows, key=score.rank)
            pairs = zip(method["seeds"], best["seeds"], strict=True)
            both = [(a, b) for a, b in pairs if not (a["diverged"] or b["diverged"])]
            known = np.array([(a[score.key], b[score.key]) for a, b in both], float)  # or NaN
            found[base] = {"to": best["name"], score.key: summary(known.reshape(-1, 2) @ (1, -1))}
    return found


def collect(description: Json, parameters: int, outcomes: Mapping[str, Outcome]) -> Record:
    """The results of a run from the outcomes of its methods; NaN becomes ``None``.

    A seed has diverged if its final training loss is not finite; summaries are over the others.
    """
    seeds, score = description["seeds"], Score.of(description)
    methods = [
        {**method, **_of_method(method, seeds, outcomes[method["name"]], score)}
        for method in description["methods"]
    ]
    return {
        **{"format": FORMAT, "format_version": FORMAT_VERSION},
        **description,
        "parameters": parameters,
        "units": {**UNITS, score.key: score.meaning},
        "versions": versions(),
        "methods": [{**row, "differences": _differences(row, methods, score)} for row in methods],
    }


def _of_method(method: Json, seeds: list[int], outcome: Outcome, score: Score) -> Record:
    curves, best = outcome.curves, np.fmax if score.higher_is_better else np.fmin
    final = {score.key: curves[score.key][-1], f"best_{score.key}": best.reduce(curves[score.key])}
    final |= {"train_loss": curves["train_loss"][-1], "sharpness": outcome.sharpness}
    if "tune" in method:
        final[f"tuned_{score.key}"] = curves[score.key][method["tune"]["epoch"] - 1]
    finite = np.isfinite(final["train_loss"])
    runs = [
        {
            "seed": seed,
            "diverged": not finite[i].item(),
            **{name: number(values[i]) for name, values in final.items()},
            "curves": {name: [*map(number, values[:, i])] for name, values in curves.items()},
        }
        for i, seed in enumerate(seeds)
    ]
    return {
        "step_cost": number(outcome.cost),
        "epoch_seconds": float(np.median(outcome.seconds)),
        "compile_seconds": outcome.compile_seconds,
        "diverged": int(np.sum(~finite)),
        "summary": {name: summary(values[finite]) for name, values in final.items()},
        "seeds": runs,
    }


def to_json(results: Json) -> bytes:
    """All results as JSON; undecodable bytes of a path are escaped."""
    text = json.dumps(results, indent=1, allow_nan=False, ensure_ascii=False)
    return (text + "\n").encode(errors="backslashreplace")


def from_json(path: Path) -> Record | None:
    """Reads the output of :func:`to_json`, if any.

    Raises:
      UserError: the file is of another version.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    kind = found.get("format") if isinstance(found, dict) else None
    if not str(kind).startswith("sam_optax."):
        return None
    if (kind, found.get("format_version")) != (FORMAT, FORMAT_VERSION):
        raise UserError(
            f"{path}: has format {kind} {found.get('format_version')} of another version of "
            f"sam_optax, not {FORMAT} {FORMAT_VERSION}; use that version, or train again."
        )
    return found


@contextlib.contextmanager
def describing(path: Path) -> Iterator[None]:
    """Turns what fails for the contents of a ``results.json`` or checkpoint into an error of it.

    Readers have defaults for what files of earlier versions may lack.
    """
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"{path}: describes no run of this version ({type(error).__name__}: {error}); restore "
            "the file, or train again with --out."
        ) from error
