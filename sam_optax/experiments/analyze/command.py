"""``python -m sam_optax analyze RUN_DIR ...``: the sharpness of the networks of some runs."""

import csv
import dataclasses
import io
import json
from collections.abc import Mapping, Sequence

from sam_optax.experiments.analyze import figures
from sam_optax.experiments.analyze.measures import (
    ADAPTIVE,
    KINDS,
    Analyze,
    Numbers,
    Quantity,
    measure,
)
from sam_optax.experiments.analyze.table import print_tables
from sam_optax.experiments.finished import Network, Run, measured, open_runs
from sam_optax.experiments.reporting.console import Console, say
from sam_optax.experiments.reporting.output import OutputDirectory
from sam_optax.experiments.reporting.results import to_json, versions

__all__ = ["Analyze", "run"]


def run(options: Analyze) -> None:
    """Measures the networks, writes the files and prints the tables."""
    runs = open_runs(options.run_dirs)
    every = [network for opened in runs for network in opened.networks]
    networks = [of for of in every if of.seed in of.run.task.seeds[: options.seeds]]
    with OutputDirectory(options.out or options.run_dirs[0]) as out:
        found = measured(networks, "measuring", lambda network: measure(network, options))
        try:
            out.write(files(runs, options, found))
            out.write(figures.of_numbers(options, found))
            if "slices" in options.measures:
                out.write(figures.slices(networks))
        finally:  # where either fails, a full disk or a closed pipe, there is still the other
            print_tables(Console(), options, found)
    say(f"\nThe files are in {out.path}.", stderr=False)


def files(
    runs: Sequence[Run], options: Analyze, found: Mapping[Network, Numbers]
) -> dict[str, bytes]:
    """``analysis.json`` and ``analysis.csv``, with a line for each number."""
    names = ("run", "method", "seed", "epoch")
    content = {
        **{"format": "sam_optax.analyze", "format_version": 3},
        "runs": [
            {
                **{"directory": run.directory, "settings": run.results["settings"]},
                "sha256": run.task.dataset.sha256,
            }
            for run in runs
        ],
        "options": dataclasses.asdict(options),
        "adaptive_sharpness": {**ADAPTIVE, "biases": "not normalized"},
        "units": {
            name: f"{kind.unit}, {kind.meaning}".removeprefix(", ") for name, kind in KINDS.items()
        },
        "versions": versions(),
        "networks": [
            {
                **dict(zip(names, (of.run.directory, of.name, of.seed, of.epoch), strict=True)),
                "measured": [{**what._asdict(), "value": x} for what, x in numbers.items()],
            }
            for of, numbers in found.items()
        ],
    }
    # JSON has no infinity: it is a text, as paths are.
    text = json.dumps(content, default=str)
    plain = json.loads(text, parse_constant={"Infinity": "inf"}.__getitem__)
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow([*names, *Quantity._fields, "value"])
    for network in plain["networks"]:
        *of, rows = network.values()
        writer.writerows([*of, *row.values()] for row in rows)
    table = lines.getvalue().encode(errors="backslashreplace")
    return {"analysis.json": to_json(plain), "analysis.csv": table}
