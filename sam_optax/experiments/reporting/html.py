"""The report of a run: one self-contained HTML page."""

import base64
from collections.abc import Mapping

import jinja2

from sam_optax.experiments.reporting import figures, table, words
from sam_optax.experiments.types import Json

_COST = ["name", "epochs", "steps_per_epoch", "batch_size", "gradients"]
_COST += ["epoch_seconds", "examples_per_second", "compile_seconds"]


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
    methods, columns = found["methods"], table.columns(found)
    settings = [
        [method, name, value, source]
        for method, name, value, source in words.settings(found)
        if method or source != "default" or (value and words.used(found, name))
    ]
    origin = {"seeds": found["seeds"], **found.get("versions", {})}
    origin["data, SHA-256"] = found["dataset"]["sha256"]
    sections = {  # heading: header, rows, number of columns of text
        "Settings": (["method", "setting", "value", "where the value is from"], settings, 4),
        "Cost": ([*map(words.named, _COST)], [[m.get(key) for key in _COST] for m in methods], 1),
        "Data and software": (["", ""], list(origin.items()), 2),
    }
    rows = [*zip(*(column.cells for column in columns), strict=True)]
    what = methods[0].get("title") if len(methods) == 1 else f"{len(methods)} methods"
    template = environment.get_template("report.html")
    return template.render(
        title=f"{what}: {words.task(found)}",
        heading=[*words.heading(found), f"{found.get('parameters', 0):,} params"],
        notes=found.get("notes", []),
        table=([column.heading for column in columns], rows, 2),
        legend=table.legend(columns),
        figures=[(figures.CAPTIONS[n], base64.b64encode(p).decode()) for n, p in drawn.items()],
        sections=sections,
    ).encode()
