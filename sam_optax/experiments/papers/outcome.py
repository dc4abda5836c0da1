# ruff: noqa: RUF001 (the papers' Greek letters, in what is printed)
"""What came out of a run: as data, on the terminal and in files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.serialization
import jax
from rich.console import Console

from sam_optax.experiments import results
from sam_optax.experiments.output import OutputDirectory
from sam_optax.experiments.papers.loop import Cost
from sam_optax.experiments.papers.options import SUPPORTED, Train
from sam_optax.experiments.papers.plan import Plan
from sam_optax.experiments.papers.progress import rate
from sam_optax.experiments.papers.settings import Settings
from sam_optax.experiments.papers.step import State


def title(chosen: Settings) -> str:
    """What the run is, in a few words."""
    method = SUPPORTED[chosen["method"]].title
    name = method if chosen["method"] != "sgd" else chosen["optimizer"].upper()
    data = chosen["dataset"].partition(":")
    label = data[0] if data[0] != "tfds" else Path(data[2]).expanduser().resolve().parent.name
    return f"{name}: {chosen['model']} on {label}"


def description(options: Train, chosen: Settings, extent: Plan, params: Any) -> dict[str, Any]:
    """What was trained, as plain data."""
    return {
        "title": title(chosen),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "preset": options.preset,
        "scale": options.scale,
        "shrunk": list(extent.shrunk),
        "settings": {name: setting._asdict() for name, setting in chosen.table.items()},
        "differs": list(chosen.preset.differs) if chosen.preset else [],
        "seed": options.seed,
        "dtype": options.dtype,
        "versions": results.versions(),
    }


def cost(
    chosen: Settings, extent: Plan, spent: Cost, total: Mapping[str, float], devices: int
) -> dict[str, str]:
    """What it cost, in words.

    Args:
      chosen: the settings.
      extent: the plan.
      spent: by this process.
      total: seconds and images of the training steps, of earlier processes, too.
      devices: number of devices.
    """
    seconds, images = total["train_seconds"], total["train_images"]
    processes = jax.process_count()
    groups = extent.groups
    table = {
        "gradients a step": f"{SUPPORTED[chosen['method']].gradients:g}"
        + (f" on each of {groups} groups" if groups > 1 else ""),
        "devices": f"{devices}" + (f" in {processes} processes" if processes > 1 else ""),
        "seconds a step": f"{seconds * extent.batch_size / images:.4g}",
        "images a second": rate(images / seconds),
        "training steps": f"{seconds:,.1f} s for {images:,} images",
        "compilation of the step": f"{spent.compile_seconds:.1f} s",
    }
    if spent.flops:
        # The compiler counts the body of the loop over groups once.
        some = f" with one group of {groups}" if groups > 1 else ""
        table["operations a step and device"] = f"{spent.flops:.3g}{some} (the compiler's count)"
    return table


def rise(sharpness: Mapping[str, Any]) -> str:
    """The sharpness, and of what."""
    value = sharpness["value"]
    text = "not finite" if value is None else f"{value:.4g} nats"
    return f"{text} at ρ {sharpness['rho']:g}, on {sharpness['examples']:,} training examples"


def show(console: Console, found: Mapping[str, Any]) -> None:
    """Prints the outcome."""
    last = found["points"][-1]
    console.print(f"{found['title']} ({found['parameters']:,} params)", soft_wrap=True)
    console.print(f"test accuracy  {100 * last['test_accuracy']:.2f} %")
    if found["sharpness"]:
        console.print(f"sharpness      {rise(found['sharpness'])}", soft_wrap=True)
    console.print(f"speed          {found['cost']['images a second']} images/s")


def read(directory: Path) -> dict[str, Any] | None:
    """The ``results.json`` of a directory; ``None`` if there is none of a finished training."""
    try:
        found = json.loads((directory / "results.json").read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "identity" in found else None


def write(out: OutputDirectory, found: Mapping[str, Any], state: State) -> None:
    """Writes the trained params, the report and the results."""
    from sam_optax.experiments.papers import report  # matplotlib takes its time

    # A path may hold what is no text; \\udc.. is how JSON writes that.
    results_json = json.dumps(found, indent=1, ensure_ascii=False).encode(errors="backslashreplace")
    variables = jax.device_get({"params": state.params, "batch_stats": state.batch_stats})
    out.write(
        {
            "params.msgpack": flax.serialization.to_bytes(variables),
            "report.html": report.html_page(found),
            "results.json": results_json,
        }
    )
