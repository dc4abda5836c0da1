"""The report of a run: one page, with its figures."""

import base64
from collections.abc import Mapping

import jinja2

from sam_optax.experiments.reporting import table, words
from sam_optax.experiments.reporting.figures import CAPTIONS
from sam_optax.experiments.reporting.stream import printable
from sam_optax.experiments.types import Json


def html_page(found: Json, drawn: Mapping[str, bytes]) -> bytes:
    """The report of a run: one self-contained page, with the given figures by file name."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("sam_optax.experiments.reporting"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        finalize=lambda x: x if hasattr(x, "__html__") else printable(words.plain(x), "\n"),
    )
    methods, columns = found["methods"], table.columns(found)
    settings = [
        [method, name, value, source]
        for method, name, value, source in words.settings(found)
        if method or source != "default" or (value and words.used(found, name))
    ]
    origin = {"seeds": found["seeds"], **found.get("versions", {})}
    origin["data, SHA-256"] = found["dataset"]["sha256"]
    sections = {
        "Settings": (["method", "setting", "value", "where the value is from"], settings),
        "Data and software": (["", ""], origin.items()),
    }
    rows = [*zip(*(column.cells for column in columns), strict=True)]
    what = methods[0].get("title") if len(methods) == 1 else f"{len(methods)} methods"
    template = environment.get_template("report.html")
    return template.render(
        title=f"{what}: {words.task(found)}",
        heading=[*words.heading(found), f"{found.get('parameters', 0):,} params"],
        notes=found.get("notes", []),
        table=([column.heading for column in columns], rows),
        legend=table.legend(columns),
        figures=[(CAPTIONS[n], base64.b64encode(p).decode()) for n, p in drawn.items()],
        sections=sections,
    ).encode()
