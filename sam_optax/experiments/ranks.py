# ruff: noqa: RUF001 (the papers' Greek letters and mathematical signs, in what is printed)
"""``python -m sam_optax ranks``: table 1 of the ASAM paper, on small networks."""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console

from sam_optax import analysis
from sam_optax.experiments.data.dataset import load
from sam_optax.experiments.data.labels import corrupt
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.reporting import output
from sam_optax.experiments.reporting.progress import Progress
from sam_optax.experiments.reporting.results import number, versions
from sam_optax.experiments.reporting.table import ruled
from sam_optax.experiments.reporting.words import counted, printable
from sam_optax.experiments.training.measures import ready

GRID: dict[str, tuple[float, ...]] = {
    "batch size": (32, 128),
    "learning rate": (0.03, 0.1, 0.3),
    "weight decay": (1e-5, 1e-4, 1e-3),
    "dropout": (0.0, 0.2, 0.5),
}
MOMENTUM, WIDTH, BOOTSTRAPS = 0.9, 64, 400
MEASURES: dict[str, tuple[Any, float, tuple[float, ...]]] = {
    "sharpness, p = 2": (analysis.sharpness, 2, (0.01, 0.1, 0.5)),
    "adaptive sharpness, p = 2": (analysis.adaptive_sharpness, 2, (0.01, 0.1, 1.0)),
    "sharpness, p = ∞": (analysis.sharpness, np.inf, (0.0003, 0.003, 0.01)),
    "adaptive sharpness, p = ∞": (analysis.adaptive_sharpness, np.inf, (0.001, 0.01, 0.1)),
}
"""Measure, norm p, and the radii of which the one with the largest τ counts, as in the paper."""

LEGEND = """
τ: Kendall's, with the middle 95 % of bootstraps over settings; then the granulated coefficient
of each hyperparameter, and Ψ, their mean
adaptive sharpness: element-wise, η = 0, biases not normalized (the networks have a hidden one,
so it is not invariant to every rescaling)
adaptive − sharpness: difference of τ, each at its best ρ"""


@dataclasses.dataclass(frozen=True)
class Ranks:
    """Asks which measure of sharpness ranks networks by their generalization gap.

    Trains networks with one hidden layer on a grid of batch size, learning rate, weight decay and
    dropout, and prints the rank correlation of each measure with the gap (test loss minus training
    loss): Kendall's tau, and the granulated coefficient of each hyperparameter.
    """

    dataset: str = "digits"
    """digits, mnist5k, npz:PATH or hf:NAME_OR_PATH, as for compare."""
    label_noise: float = 0.0
    """Share of the training and of the test labels that is moved to another class, in [0, 1)."""
    seeds: int = 3
    """Networks for each setting of the grid."""
    epochs: int = 30
    """Passes over the training set."""
    ascent_steps: int = 5
    """Ascent steps of the sharpness measures."""
    out: Path | None = None
    """JSON file for all numbers."""

    def __post_init__(self) -> None:
        if not 0 <= self.label_noise < 1:
            raise UserError(f"--label-noise {self.label_noise:g}: use a number in [0, 1).")
        for name in ("seeds", "epochs", "ascent_steps"):
            if getattr(self, name) < 1:
                flag = name.replace("_", "-")
                raise UserError(f"--{flag} {getattr(self, name)}: use an integer of at least 1.")
        output.check_file(self.out)


def run(options: Ranks) -> None:
    """Trains and measures the networks, writes the file and prints a table."""
    dataset = load(options.dataset)
    if not dataset.resident:
        raise UserError(f"--dataset {options.dataset}: does not fit in memory; use a smaller one.")
    rng = np.random.default_rng(0)
    parts = []
    for part in (dataset.train, dataset.test):
        # Test labels are as wrong as training labels: the gap is between samples of one kind.
        y = corrupt(part.y, options.label_noise, dataset.classes, rng)
        parts.append((ready(dataset, jnp.asarray(part.x)).reshape(len(y), -1), jnp.asarray(y)))
    of = [analysis.DatasetLoss.from_examples(example_losses, part, 2000) for part in parts]
    radii = [(name, rho) for name, (*_, radii) in MEASURES.items() for rho in radii]
    work = {"training": (3.0, len(GRID["batch size"])), "measuring": (1.0, len(radii))}
    with Progress(Console(stderr=True, highlight=False), work, "ranks:") as progress:
        networks, columns = train_grid(parts[0], dataset.classes, options, progress.done)
        losses = [np.asarray(jax.lax.map(loss, networks)) for loss in of]
        # The training loss needs no ascent: what a measure of sharpness has to beat.
        values = {("training loss", 0.0): losses[0]}
        for name, rho in radii:
            start = time.perf_counter()
            found = measured(name, of[0], networks, rho, steps=options.ascent_steps)
            values[name, rho] = np.asarray(found)
            progress.done("measuring", time.perf_counter() - start)
    gap = losses[1] - losses[0]
    fine = np.isfinite([gap, *values.values()]).all(axis=0)
    if not fine.any():
        raise UserError("all networks diverged: there is nothing to rank.")
    columns = {name: list(np.array(column)[fine]) for name, column in columns.items()}
    rows = table({key: value[fine] for key, value in values.items()}, gap[fine], columns)
    content: dict[str, Any] = {
        "options": {**dataclasses.asdict(options), "out": str(options.out)},
        "sha256": dataset.sha256,
        "versions": versions(),
        "diverged": int((~fine).sum()),
        "measures": rows,
    }
    if options.out is not None:
        output.write_json(options.out, content)
    ranges = (f"{x[fine].min():.3g} to {x[fine].max():.3g}" for x in (losses[0], gap))
    heading = (
        f"{printable(options.dataset)}: {fine.sum()} networks ({(~fine).sum()} diverged), "
        f"{counted(options.seeds, 'seed')}, {options.label_noise:.0%} wrong labels\n"
        "training loss {}, gap {} nats\n".format(*ranges)
    )
    _print(heading, rows)


def example_losses(params: Any, batch: Any, mask: Any = 1.0) -> jax.Array:
    """Cross entropies in nats, of one hidden layer of rectifiers; ``mask`` is dropout's."""
    hidden = mask * jax.nn.relu(batch[0] @ params["first"]["kernel"] + params["first"]["bias"])
    logits = hidden @ params["second"]["kernel"] + params["second"]["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1])


@functools.partial(jax.jit, static_argnames=("batch_size", "epochs", "classes"))
def train(settings: Sequence[Any], batch: Any, batch_size: int, epochs: int, classes: int) -> Any:
    """Trains a network for each entry of the vectors of settings, side by side."""
    x, y = batch
    steps = epochs * (len(x) // batch_size)

    def dense(key: jax.Array, inputs: int, outputs: int) -> dict[str, jax.Array]:
        kernel = jax.random.normal(key, (inputs, outputs)) * (2 / inputs) ** 0.5
        return {"kernel": kernel, "bias": jnp.zeros(outputs)}

    def one(rate: Any, decay: Any, dropout: Any, seed: Any) -> Any:
        keys = jax.random.split(jax.random.key(seed), 3)
        params: Any = {
            "first": dense(keys[0], x.shape[1], WIDTH),
            "second": dense(keys[1], WIDTH, classes),
        }
        sgd = optax.sgd(optax.cosine_decay_schedule(rate, steps), MOMENTUM)
        tx = optax.chain(optax.add_decayed_weights(decay), sgd)

        def step(carry: Any, t: jax.Array) -> tuple[Any, None]:
            params, state = carry
            choose, drop = jax.random.split(jax.random.fold_in(keys[2], t))
            index = jax.random.randint(choose, (batch_size,), 0, len(x))
            kept = jax.random.bernoulli(drop, 1 - dropout, (batch_size, WIDTH)) / (1 - dropout)
            some = x[index], y[index]
            grads = jax.grad(lambda p: example_losses(p, some, kept).mean())(params)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, tx.init(params)), jnp.arange(steps))[0][0]

    return jax.vmap(one)(*settings)


def train_grid(
    batch: Any, classes: int, options: Ranks, done: Callable[[str, float], None]
) -> tuple[Any, dict[str, list[Any]]]:
    """Stacked params of all networks, and the columns of their hyperparameters."""
    settings = [*itertools.product(*GRID.values(), range(options.seeds))]
    stacks = []
    for size, group in itertools.groupby(settings, key=lambda setting: int(setting[0])):
        start = time.perf_counter()
        vectors = [np.array(column) for column in zip(*group, strict=True)][1:]
        sizes = {"batch_size": size, "epochs": options.epochs, "classes": classes}
        stacks.append(jax.block_until_ready(train(vectors, batch, **sizes)))
        done("training", time.perf_counter() - start)
    columns = dict(zip([*GRID, "seed"], map(list, zip(*settings, strict=True)), strict=True))
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *stacks), columns


@functools.partial(jax.jit, static_argnames=("name", "steps"))
def measured(name: str, loss: Any, networks: Any, rho: Any, steps: int) -> jax.Array:
    """A measure of all networks."""
    measure, p, _ = MEASURES[name]
    options = {"steps": steps, "restarts": 0, "p": p}
    return jax.lax.map(lambda params: measure(loss, params, rho, **options).value, networks)


def table(
    values: Mapping[tuple[str, float], np.ndarray],
    gap: np.ndarray,
    columns: Mapping[str, Sequence[Any]],
) -> list[dict[str, Any]]:
    """The rank statistics of each measure, and by how much adaptive sharpness is better."""
    settings = list(zip(*(columns[name] for name in GRID), strict=True))
    rows: list[dict[str, Any]] = []
    for (name, rho), value in values.items():
        found = analysis.rank_statistics(value, gap, columns, hold=("seed",))
        row: dict[str, Any] = {"measure": name, "rho": rho or None, "tau": number(found.tau)}
        row |= {"interval": interval(value, gap, settings)}
        row |= {key: number(found.psi[key]) for key in GRID}
        rows.append(row | {"average": number(found.average)})
    tau = functools.partial(analysis.kendall_tau, gap=gap)
    best = {m: max((v for (n, _), v in values.items() if n == m), key=tau) for m in MEASURES}
    for name in (name for name in MEASURES if name.startswith("sharpness")):
        plain, adaptive = best[name], best[f"adaptive {name}"]
        row = {"measure": f"adaptive − {name}", "tau": number(tau(adaptive) - tau(plain))}
        row |= {"interval": interval(adaptive, gap, settings, plain)}
        rows.append(dict.fromkeys(rows[0]) | row)
    return rows


def interval(
    values: np.ndarray, gap: np.ndarray, groups: Sequence[Any], other: np.ndarray | None = None
) -> list[float]:
    """95 % bootstrap interval of τ (or of its excess over another measure's) over settings."""
    rng = np.random.default_rng(0)
    members = [np.flatnonzero([g == group for g in groups]) for group in dict.fromkeys(groups)]
    taus = []
    for _ in range(BOOTSTRAPS):
        runs = np.concatenate([members[i] for i in rng.integers(len(members), size=len(members))])
        tau = analysis.kendall_tau(values[runs], gap[runs])
        taus.append(tau if other is None else tau - analysis.kendall_tau(other[runs], gap[runs]))
    return np.quantile(taus, [0.025, 0.975]).tolist()


def _print(heading: str, rows: Sequence[Mapping[str, Any]]) -> None:
    shown = ruled()
    shown.add_column("measure")
    for name in ("ρ", "τ", "95 %", *GRID, "Ψ"):
        shown.add_column(name.replace(" ", "\n") if name in GRID else name, justify="right")
    for row in rows:
        name, rho, tau, (low, high), *rest = row.values()
        cells = ["–" if x is None else f"{x:.3f}" for x in (tau, *rest)]
        radius = "–" if rho is None else f"{rho:g}"
        shown.add_row(name, radius, cells[0], f"{low:.2f} to {high:.2f}", *cells[1:])
    console = Console(highlight=False, markup=False)
    console.print(heading)
    console.print(shown)
    console.print(LEGEND, style="dim")
