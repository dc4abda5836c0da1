"""``python -m sam_optax analyze RUN_DIR ...``: the sharpness of the networks of some runs."""

import collections
import os
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from sam_optax.experiments.analyze import figures
from sam_optax.experiments.analyze.files import files
from sam_optax.experiments.analyze.measures import Measured, measure
from sam_optax.experiments.analyze.options import Analyze
from sam_optax.experiments.analyze.table import print_tables
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.finished import Losses, open_runs
from sam_optax.experiments.reporting.output import OutputDirectory
from sam_optax.experiments.reporting.progress import Progress
from sam_optax.experiments.reporting.words import printable

__all__ = ["Analyze", "run"]


def run(options: Analyze) -> None:
    """Measures the networks, writes the files and prints the tables."""
    runs, losses = open_runs(options.run_dirs), Losses()
    networks = [
        Measured(name, network, {})
        for name, opened in zip(_names(options.run_dirs), runs, strict=True)
        for network in opened.networks
        if network.seed in opened.task.seeds[: options.seeds]
    ]
    measured = []
    with OutputDirectory(options.out or options.run_dirs[0]) as out:
        counts = collections.Counter(of.title for of in networks)
        work = {title: (1.0, count) for title, count in counts.items()}
        with Progress(Console(stderr=True, highlight=False), work, "measuring") as progress:
            for of in networks:
                start = time.perf_counter()
                measured.append(of._replace(values=measure(of.network, losses, options)))
                progress.done(of.title, time.perf_counter() - start)
        try:
            out.write(files(runs, options, measured))
            out.write(figures.of_numbers(options, measured))
            if "slices" in options.measures:
                out.write(figures.slices(losses, measured))
        finally:  # where either fails, a full disk or a closed pipe, there is still the other
            print_tables(Console(highlight=False), options, measured)
    path = printable(str(out.path))
    Console(highlight=False).print(Text(f"\nThe files are in {path}."), soft_wrap=True)


def _names(directories: Sequence[Path]) -> list[str]:
    """The paths without what they share; nothing for a single run."""
    paths = [os.path.abspath(directory) for directory in directories]
    for i, path in enumerate(paths):
        if path in paths[:i]:
            raise UserError(f"RUN_DIR {directories[i]}: is given twice; give each run once.")
    shared = os.path.commonpath(paths)
    return [os.path.relpath(path, shared) if len(paths) > 1 else "" for path in paths]
