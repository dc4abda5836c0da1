"""The numbers as files: ``analysis.json`` and ``analysis.csv``, with a line for each number."""

import csv
import dataclasses
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sam_optax.experiments.analyze.measures import ADAPTIVE, UNITS, Measured, Quantity
from sam_optax.experiments.analyze.options import Analyze
from sam_optax.experiments.finished import Run
from sam_optax.experiments.reporting.results import versions
from sam_optax.experiments.types import Record


def files(runs: Sequence[Run], options: Analyze, measured: Sequence[Measured]) -> dict[str, bytes]:
    """The files, by name."""
    networks: list[Record] = [
        {
            "run": str(of.network.run.directory),
            "method": of.network.name,
            "seed": of.network.seed,
            "epoch": of.network.epoch,
            "measured": [{**what._asdict(), "value": x} for what, x in of.values.items()],
        }
        for of in measured
    ]
    content = {
        "format": "sam_optax.analyze",
        "format_version": 3,
        "runs": [
            {
                "directory": str(run.directory),
                "settings": run.results["settings"],
                "sha256": run.results["dataset"]["sha256"],
            }
            for run in runs
        ],
        "options": dataclasses.asdict(options),
        "adaptive_sharpness": {
            **{key: ADAPTIVE[key] for key in ("normalization", "eta")},
            "biases": "not normalized",
        },
        "units": UNITS,
        "versions": versions(),
        "networks": networks,
    }
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow(["run", "method", "seed", "epoch", *Quantity._fields, "value"])
    for network in networks:
        *of, rows = network.values()
        writer.writerows([*of, *row.values()] for row in rows)
    return {
        "analysis.json": (json.dumps(_plain(content), indent=1, allow_nan=False) + "\n").encode(),
        "analysis.csv": lines.getvalue().encode(errors="backslashreplace"),
    }


def _plain(content: Any) -> Any:
    """What JSON can hold: paths and infinity become text."""
    if isinstance(content, dict):
        return {key: _plain(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_plain(value) for value in content]
    return str(content) if isinstance(content, Path) or content == math.inf else content
