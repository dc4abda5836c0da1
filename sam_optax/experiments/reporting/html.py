"""The report of a run: one self-contained HTML page."""

import base64
from collections.abc import Mapping
from typing import Any

import jinja2

from sam_optax.experiments.reporting import figures, results, table, words
from sam_optax.experiments.types import Json

_COST: tuple[str, ...] = ("name", "epochs", "steps_per_epoch", "batch_size", "gradients")
_COST += ("epoch_seconds", "examples_per_second", "compile_seconds")


def html_page(found: Json, drawn: Mapping[str, bytes]) -> bytes:
    """The page, with figures from :func:`~sam_optax.experiments.reporting.figures.all_figures`."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("sam_optax.experiments.reporting"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        finalize=lambda x: words.printable(x, "\n") if type(x) is str else x,
    )
    environment.filters["plain"] = words.plain
    data = {"data, SHA-256": found["dataset"]["sha256"]}
    every = words.settings(found)
    headings = ["method", "setting", "value", "where the value is from"]
    shared = [row for method, *row in every if not method and not _unused(found, *row)]
    cost = [[method[key] for key in _COST] for method in found["methods"]]
    origin = {"seeds": found["seeds"]} | found["versions"] | data
    sections = {  # heading: header, rows, number of columns of text
        "Settings": (headings[1:], shared, 3),
        "Methods": (headings, [row for row in every if row[0]], 4),
        "Cost": ([words.named(key) for key in _COST], cost, 1),
        "Data and software": (["", ""], list(origin.items()), 2),
    }
    template = environment.get_template("report.html")
    images = [(figures.CAPTIONS[n], base64.b64encode(png).decode()) for n, png in drawn.items()]
    shown, legend = table.summarize(found)
    rows = [*zip(*(column.cells for column in shown.columns), strict=True)]
    return template.render(
        title=_title(found),
        headline=headline(found),
        heading=[*words.heading(found), f"{found['parameters']:,} params"],
        notes=found["notes"],
        table=([column.header for column in shown.columns], rows, 2),
        legend=legend,
        figures=images,
        sections=sections,
    ).encode()


def headline(found: Json) -> str:
    """The outcome in a sentence, which names a winner only where the difference is certain."""
    known = [m for m in found["methods"] if m["summary"]["test_accuracy"]["mean"] is not None]
    ranked = sorted(known, key=lambda method: -method["summary"]["test_accuracy"]["mean"])
    if not ranked:
        return "Every run diverged."
    text, seeds = f"Test accuracy after the last epoch: {_accuracy(ranked[0])}", found["seeds"]
    if len(ranked) == 1:
        return f"{text} ({words.counted(len(seeds), 'seed')})."
    gain = results.gain(*ranked[:2])
    points = f"{words.percent(gain, 'interval', '+')} points, seed by seed"
    if gain["mean"] and gain["interval"] is not None and gain["mean"] > gain["interval"]:
        return f"{text}, above {_accuracy(ranked[1])} by {points} (95 % interval)."
    why = f"{points}; 95 % interval" if gain["interval"] is not None else "too few seeds to tell"
    return f"{text} and {_accuracy(ranked[1])} are not told apart ({why})."


def _accuracy(method: Json) -> str:
    return f"{method['name']} {words.percent(method['summary']['test_accuracy'])} %"


def _title(found: Json) -> str:
    methods = found["methods"]
    what = methods[0]["title"] if len(methods) == 1 else f"{len(methods)} methods"
    if words.setting(found, "frontier"):
        what = "Accuracy against cost"
    return f"{what}: {words.setting(found, 'model')} on {words.data_name(found)}"


def _unused(found: Json, name: str, value: Any, source: str) -> bool:
    """Whether a shared setting has no effect in this run."""
    adam = words.setting(found, "optimizer", "adam").startswith("adam")
    other = {"beta2": adam, "image size": found["dataset"]["name"].startswith("hf:")}
    return source == "default" and not (value and other.get(name, True))
