# ruff: noqa: RUF001, RUF009 (the papers' Greek letters, in help texts; functions declare fields)
"""``python -m sam_optax analyze RUN_DIR ...``: the sharpness of the networks of some runs."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sam_optax import analysis
from sam_optax.experiments.analyze import show
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.finished import Network, open_run
from sam_optax.experiments.options import declare
from sam_optax.experiments.options.declare import option
from sam_optax.experiments.reporting import results, words
from sam_optax.experiments.reporting.console import Console, say
from sam_optax.experiments.reporting.output import OutputDirectory
from sam_optax.experiments.reporting.progress import Progress
from sam_optax.experiments.types import PyTree, Record

MEASURES = ("sharpness", "adaptive_sharpness", "eigenvalues", "stability", "slices")


@dataclasses.dataclass(frozen=True)
class Analyze:
    """Measures the sharpness of the networks that compare --out has trained.

    Reports sharpness, adaptive sharpness and the largest eigenvalues of the Hessian on the
    training set (at most 10,000 examples) with the labels used in training, of all networks that
    --save-every has kept. Draws slices of the loss through the last networks of the first seed.
    """

    run_dirs: tuple[Path, ...] = option(
        (), "Directories of --out of finished runs.", metavar="RUN_DIR", positional=True
    )
    out: Path | None = option(
        None, "Directory for the files (default: that of the run, if there is one).", metavar="DIR"
    )
    measures: tuple[str, ...] = option(
        ("sharpness", "adaptive_sharpness", "eigenvalues", "slices"),
        f"What to measure or draw, any of {', '.join(MEASURES)} (of the gradient along the ascent, "
        "with BatchNorm as in training).",
        declare.one_of(MEASURES),
        "MEASURE",
    )
    rho: tuple[float, ...] = option(
        (0.5,), "Radii ρ of sharpness; of stability the largest counts.", declare.POSITIVE
    )
    adaptive_rho: tuple[float, ...] = option(
        (1.0,), "Radii ρ of adaptive sharpness, relative to the weights.", declare.POSITIVE
    )
    p: tuple[float, ...] = option(
        (2.0,),
        "Norms p of the balls of both, such as 2 or inf.",
        declare.allowed(lambda p: p >= 1, "use at least 1, or inf"),
    )
    m: int | None = option(
        None, "Examples per group of m-sharpness, for both (default: all).", declare.COUNT, "INT"
    )
    gamma: tuple[float, ...] = option(
        (0.0, 0.0866, 0.1, 0.1118), "Noise γ of stability: R-SAM's figures'.", declare.NOT_NEGATIVE
    )
    noise_scale: str = option(
        "isotropic",
        "Of stability: isotropic as in R-SAM's text, or relative, sqrt_norm or norm as in rsam.",
        declare.one_of(("isotropic", "relative", "sqrt_norm", "norm")),
    )
    seeds: int | None = option(
        None, "Number of seeds to measure, from the first (default: all).", declare.COUNT, "INT"
    )

    def __post_init__(self) -> None:
        """Raises :class:`UserError` for a value out of range, before anything is loaded."""
        declare.check(self)
        if not self.run_dirs:
            raise UserError("RUN_DIR: none is given; give the directories of --out of runs.")
        if len(self.run_dirs) > 1 and self.out is None:
            raise UserError("RUN_DIR: there are several; give --out DIR for the files.")


def run(options: Analyze) -> None:
    """Measures the networks, writes the files and prints the table."""
    runs = [open_run(directory) for directory in dict.fromkeys(options.run_dirs)]
    for opened in runs:
        if opened.task.dataset.sha256 != runs[0].task.dataset.sha256:
            raise UserError(
                f"{opened.directory}: was trained on other data than {runs[0].directory}."
            )
    with OutputDirectory(options.out or options.run_dirs[0]) as out:
        found = _measured([network for opened in runs for network in opened.networks], options)
        rows = [row for numbers in found.values() for row in numbers]
        content = {
            **{"format": "sam_optax.analyze", "format_version": 4, "units": show.UNITS},
            "runs": {str(opened.directory): opened.results["settings"] for opened in runs},
            "options": {name: words.plain(value) for name, value in vars(options).items()},
            **{"versions": results.versions(), "numbers": rows},
        }
        sliced = found if "slices" in options.measures else {}
        try:
            out.write({"analysis.json": results.to_json(content)})
            out.write(show.figures(rows, sliced, words.data_name(runs[0].results)))
        finally:  # where either fails, a full disk or a closed pipe, there is still the other
            show.print_table(rows, options.rho)
    say(f"\nThe files are in {out.path}.", stderr=False)


def _measured(networks: Sequence[Network], options: Analyze) -> dict[Network, list[Record]]:
    """The numbers of each network that has not diverged, a record for each."""
    networks = [of for of in networks if of.seed in of.run.task.seeds[: options.seeds]]
    found, work = {}, {"networks": (1.0, len(networks))}
    with Progress(Console(stderr=True), work, "measuring") as progress:
        for of in networks:
            variables = of.load()
            loss = of.loss(variables)
            if np.isfinite(loss(variables["params"])):
                who = {"run": str(of.run.directory), "method": of.method, "seed": of.seed}
                who |= {"epoch": of.epoch, "last": of.last}
                found[of] = [{**who, **number} for number in _numbers(of, variables, loss, options)]
            else:
                say(f"{of.path}: {of.method}, seed {of.seed}, has diverged, and is not measured.")
            progress.done("networks")
    if not found:
        raise UserError("RUN_DIR: all networks have diverged; there is nothing to measure.")
    return found


def _numbers(
    network: Network, variables: PyTree, loss: analysis.DatasetLoss, options: Analyze
) -> Iterator[Record]:
    score = words.Score.of(network.run.results)
    yield _record(score.label, score.factor * np.asarray(network.score, float))
    groups = loss if options.m is None else network.loss(variables, size=options.m)
    yield from _rises(groups, variables["params"], options)
    if "eigenvalues" in options.measures:
        largest = analysis.hessian_eigenvalues(loss, variables["params"], k=5, steps=40)
        yield _record("lambda_1", largest.values[0])
        yield _record("lambda_ratio", largest.ratio(5))
        yield _record("residual", jnp.max(largest.residuals) / jnp.abs(largest.values[0]))
    if "stability" in options.measures:
        yield from _stability(network, variables, options)


def _record(measure: str, value: Any, p: Any = None, rho: Any = None, gamma: Any = None) -> Record:
    p = "inf" if p == np.inf else p  # JSON has no infinity
    value = results.number(np.asarray(value))
    return {"measure": measure, "p": p, "rho": rho, "gamma": gamma, "value": value}


def _rises(loss: analysis.DatasetLoss, params: optax.Params, options: Analyze) -> Iterator[Record]:
    radii = {"sharpness": options.rho, "adaptive_sharpness": options.adaptive_rho}
    for name in (name for name in radii if name in options.measures):
        for p, rho in itertools.product(options.p, radii[name]):
            how = {"name": name, "p": p, "grouped": options.m is not None}
            yield _record(name, _rise(loss, params, rho, **how), p, rho)


@functools.partial(jax.jit, static_argnames=("name", "p", "grouped"))
def _rise(
    loss: Any, params: optax.Params, rho: float, *, name: str, p: float, grouped: bool
) -> jax.Array:
    """Sharpness or adaptive sharpness; with ``grouped`` the mean of each batch's."""

    def of(loss: Any) -> jax.Array:
        return getattr(analysis, name)(loss, params, rho, p=p).value

    if not grouped:
        return of(loss)
    # The measures' group_size needs batches without padding and statistics of BatchNorm.
    values = jax.lax.map(lambda batch: of(lambda w: loss.loss_fn(w, batch)), loss.batches)
    return jnp.average(values, weights=loss.weights)


def _stability(network: Network, variables: PyTree, options: Analyze) -> Iterator[Record]:
    size = network.run.task.entries[network.method].recipe.batch_size
    rhos = sorted({*options.rho, *np.linspace(0, max(options.rho), 11).round(6).tolist()})
    curves = analysis.gradient_stability(
        network.loss(variables, size=size, train=True),
        variables["params"],
        rhos,
        options.gamma,
        noise_scale=options.noise_scale,  # type: ignore[arg-type]  # one of its names
    )
    for i, gamma in enumerate(options.gamma):
        yield _record("start_loss", curves.start_loss[i].mean(), gamma=gamma)
        for name, values in {"cosine": curves.cosine, "perturbed_loss": curves.loss}.items():
            for rho, draws in zip(rhos, values[i].T, strict=True):
                yield _record(name, draws.mean(), rho=rho, gamma=gamma)
