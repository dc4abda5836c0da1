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
    score = words.Score.of(found)
    known = [m for m in found["methods"] if m["summary"][score.key]["mean"] is not None]
    ranked = sorted(known, key=score.rank, reverse=True)
    if not ranked:
        return "Every run diverged."
    first, *others = (
        f"{of['name']} {score.text(of['summary'][score.key])} {score.unit}".rstrip()
        for of in ranked
    )
    text, seeds = f"Test {score.name} after the last epoch: {first}", found["seeds"]
    if len(ranked) == 1:
        return f"{text} ({words.counted(len(seeds), 'seed')})."
    gain = results.gain(ranked[0], ranked[1], score.key)
    points = f"{score.text(gain, 'interval', '+')}{' points' * bool(score.unit)}, seed by seed"
    if gain["mean"] and gain["interval"] is not None and abs(gain["mean"]) > gain["interval"]:
        return f"{text}, better than {others[0]} by {points} (95 % interval)."
    why = f"{points}; 95 % interval" if gain["interval"] is not None else "too few seeds to tell"
    return f"{text} and {others[0]} are not told apart ({why})."


def _title(found: Json) -> str:
    methods = found["methods"]
    what = methods[0]["title"] if len(methods) == 1 else f"{len(methods)} methods"
    return f"{what}: {words.setting(found, 'model')} on {words.data_name(found)}"


def _unused(found: Json, name: str, value: Any, source: str) -> bool:
    """Whether a shared setting has no effect in this run."""
    adam = words.setting(found, "optimizer", "adam").startswith("adam")
    other = {"beta2": adam, "image size": found["dataset"]["name"].startswith("hf:")}
    return source == "default" and not (value and other.get(name, True))
