# ruff: noqa: RUF001 (the papers' Greek letters and mathematical signs)
"""The report of a run: one page of HTML that needs nothing else to be read."""

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sam_optax.experiments.papers.outcome import rise
from sam_optax.experiments.papers.progress import rate
from sam_optax.experiments.plots import COLOURS, png, tidy

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; background: #fff }
h1 { font-size: 1.5rem; line-height: 1.2 } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #ddd;
         vertical-align: top } th { font-weight: 600 }
td.number { text-align: right } img { max-width: 100% }
.note { border-left: 4px solid #E69F00; padding: .5rem 1rem; background: #fdf6e7 }
"""


def html_page(results: Mapping[str, Any]) -> bytes:
    """The page.

    Args:
      results: the contents of ``results.json``.
    """
    body = [f"<h1>{_e(results['title'])}</h1>", *_summary(results)]
    body += ["<h2>Settings</h2>", _settings(results), *_open_questions(results)]
    body += ["<h2>Curves</h2>", _image(results["points"])]
    body += ["<h2>Epochs</h2>", _epochs(results["points"])]
    body += ["<h2>Cost</h2>", _table(("", ""), results["cost"].items())]
    body += ["<h2>Software and data</h2>", _table(("", ""), _origin(results))]
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>'
        f"{_e(results['title'])}</title><style>{_STYLE}</style></head>\n<body>\n"
    )
    return (page + "\n".join(body) + "\n</body></html>\n").encode(errors="replace")


def _summary(results: Mapping[str, Any]) -> Iterable[str]:
    if results["shrunk"]:
        yield (
            '<p class="note"><b>Scaled down</b> (--scale '
            f"{results['scale']:g}): {_e('; '.join(results['shrunk']))}. The accuracy is not to be "
            "compared with the paper’s.</p>"
        )
    last = results["points"][-1]
    best = max(point["test_accuracy"] for point in results["points"])
    rows = [
        ("params", f"{results['parameters']:,}"),
        ("test accuracy after the last epoch", f"{100 * last['test_accuracy']:.2f} %"),
        ("best test accuracy of an epoch", f"{100 * best:.2f} %"),
        ("test loss", f"{last['test_loss']:.4f} nats"),
        ("training loss, as trained on", f"{last['train_loss']:.4f} nats"),
    ]
    if results["sharpness"] is not None:
        rows.append(("sharpness L(w + ε) − L(w)", rise(results["sharpness"])))
    yield _table(("", ""), rows)


def _settings(results: Mapping[str, Any]) -> str:
    rows = [(name, _value(s["value"]), s["source"]) for name, s in results["settings"].items()]
    return _table(("setting", "value", "where the value is from"), rows)


def _open_questions(results: Mapping[str, Any]) -> Iterable[str]:
    if results["differs"]:
        yield "<h2>What the paper leaves open, and what is done otherwise here</h2><ul>"
        yield from (f"<li>{_e(text)}</li>" for text in results["differs"])
        yield "</ul>"


def _epochs(points: Sequence[Mapping[str, float]]) -> str:
    every = max(1, len(points) // 20)
    shown = [p for p in points if p["epoch"] % every == 0 or p is points[-1]]
    header = ("epoch", "training loss", "test loss", "test accuracy (%)", "images/s")
    return _table(
        header,
        [
            (
                f"{p['epoch']:.0f}",
                f"{p['train_loss']:.4f}",
                f"{p['test_loss']:.4f}",
                f"{100 * p['test_accuracy']:.2f}",
                rate(p["images_per_second"]),
            )
            for p in shown
        ],
        numbers=True,
    )


def _origin(results: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    yield from results["versions"].items()
    yield "data, SHA-256", results["identity"]["data"]
    yield "seed", str(results["seed"])
    yield "computed in", results["dtype"]


def _image(points: Sequence[Mapping[str, float]]) -> str:
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    accuracy, loss = figure.subplots(1, 2)
    epochs = [point["epoch"] for point in points]
    for axes, names, scale in ((accuracy, "accuracy", 100), (loss, "loss", 1)):
        for i, part in enumerate(("train", "test")):
            values = [scale * point[f"{part}_{names}"] for point in points]
            style = "-o" if len(points) < 20 else "-"
            axes.plot(epochs, values, style, color=COLOURS[1 + i], label=part, markersize=4)
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        tidy(axes)
    accuracy.set_ylabel("accuracy (%)")
    loss.set_ylabel("loss (nats)")
    loss.legend(frameon=False)
    data = base64.b64encode(png(figure, dpi=120)).decode()
    alt = "Accuracy and loss on training and test examples after each epoch"
    caption = "<p>Training curves are means over the epoch, on augmented images and the labels "
    caption += "trained on; the test curves are on clean images.</p>"
    return f'<img alt="{alt}" src="data:image/png;base64,{data}">{caption}'


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]], numbers: bool = False) -> str:
    head = "".join(f"<th>{_e(cell)}</th>" for cell in header) if any(header) else ""
    kind = ' class="number"' if numbers else ""
    lines = ["".join(f"<td{kind}>{_e(cell)}</td>" for cell in row) for row in rows]
    return "<table>" + "\n".join(f"<tr>{line}</tr>" for line in [head, *lines] if line) + "</table>"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else f"{value}"


def _e(text: str) -> str:
    return html.escape(text)
