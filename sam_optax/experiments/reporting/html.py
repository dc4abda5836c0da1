"""The report of a run: one self-contained HTML page."""

import base64
from collections.abc import Mapping
from typing import Any

import jinja2

from sam_optax.experiments.reporting import figures, table, words
from sam_optax.experiments.types import Json

_COST = {"name": "method", "epochs": "epochs", "steps_per_epoch": "steps\nper epoch"}
_COST |= {"batch_size": "batch\nsize", "gradients": "gradients\nper step"}
_COST |= {"epoch_seconds": "seconds\nper epoch", "examples_per_second": "examples\nper second"}
_COST |= {"compile_seconds": "seconds of\ncompilation"}


def html_page(results: Json, drawn: Mapping[str, bytes]) -> bytes:
    """The page, with figures from :func:`~sam_optax.experiments.reporting.figures.all_figures`."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("sam_optax.experiments.reporting"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        finalize=_printable,
    )
    environment.filters["plain"] = words.plain
    methods, data = results["methods"], {"data, SHA-256": results["dataset"]["sha256"]}
    images = [(figures.CAPTIONS[n], base64.b64encode(png).decode()) for n, png in drawn.items()]
    page = environment.get_template("report.html").render(
        results=results,
        title=_title(results),
        headline=_headline(results),
        heading=words.heading(results),
        table=table.summarize(results),
        figures=images,
        shared=[
            [words.named(name), s["value"], s["source"]] for name, s in results["settings"].items()
        ],
        own=[[m["name"], *row] for m in methods for row in _own_settings(m)],
        cost=[[method[key] for key in _COST] for method in methods],
        cost_of=_COST.values(),
        origin=({"seeds": results["seeds"]} | results["versions"] | data).items(),
    )
    return page.encode()


def _printable(value: Any) -> Any:
    """The text of a cell, which may have several lines, without unprintable characters."""
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    return "\n".join(map(words.printable, value.split("\n")))


def _title(results: Json) -> str:
    methods = results["methods"]
    what = methods[0]["title"] if len(methods) == 1 else f"{len(methods)} methods"
    if words.setting(results, "frontier"):
        what = "Accuracy against cost"
    return f"{what}: {words.setting(results, 'model')} on {words.data_name(results)}"


def _headline(results: Json) -> str:
    """The outcome in a sentence."""
    known = [m for m in results["methods"] if m["summary"]["test_accuracy"]["mean"] is not None]
    if not known:
        return "Every run diverged."
    best = max(known, key=lambda method: method["summary"]["test_accuracy"]["mean"])
    shown = [best, *(m for m in known if m["method"] == "sgd" and m is not best)]
    texts = [f"{m['name']} {words.percent(m['summary']['test_accuracy'])} %" for m in shown]
    seeds = words.counted(len(results["seeds"]), "seed")
    return f"Test accuracy after the last epoch: {', '.join(texts)} ({seeds})."


def _own_settings(method: Json) -> list[list[Any]]:
    """The settings of a method: name, value and source."""
    values, sources = method["hyperparameters"].items(), method["sources"]
    rows = [[words.symbol(name), value, sources.get(name)] for name, value in values]
    return rows + [
        [words.named(name), s["value"], s["source"]] for name, s in method["settings"].items()
    ]
