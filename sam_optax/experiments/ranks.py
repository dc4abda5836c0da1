# ruff: noqa: RUF001 (the papers' Greek letters and mathematical signs, in what is printed)
"""Which sharpness ranks trained networks by their generalization gap: table 1 of the ASAM paper.

``python -m sam_optax.experiments.ranks`` trains a grid of batch size, learning rate, weight decay
and dropout on digits, measures every network, and prints τ and the granulated coefficients.
"""

import argparse
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sam_optax import analysis
from sam_optax.experiments import data

GRID: dict[str, tuple[float, ...]] = {
    "batch size": (32, 128),
    "learning rate": (0.03, 0.1, 0.3),
    "weight decay": (1e-5, 1e-4, 1e-3),
    "dropout": (0.0, 0.2, 0.5),
}
MOMENTUM, WIDTH = 0.9, 64
BOOTSTRAPS = 400

MEASURES: dict[str, tuple[Any, dict[str, Any], tuple[float, ...]]] = {
    "sharpness, p = 2": (analysis.sharpness, {"p": 2}, (0.01, 0.1, 0.5)),
    "adaptive sharpness, p = 2": (analysis.adaptive_sharpness, {"p": 2}, (0.01, 0.1, 1.0)),
    "sharpness, p = ∞": (analysis.sharpness, {"p": np.inf}, (0.0003, 0.003, 0.01)),
    "adaptive sharpness, p = ∞": (analysis.adaptive_sharpness, {"p": np.inf}, (0.001, 0.01, 0.1)),
}
"""Measure, norm, and the radii of which the one with the largest τ is reported, as in the paper."""

CONVENTION = (
    "adaptive sharpness: element-wise, η = 0, biases not normalized (the networks have a hidden "
    "one, so it is not invariant to every rescaling)"
)


def logits(params: Any, x: jax.Array, mask: Any = 1.0) -> jax.Array:
    """One hidden layer of rectifiers; ``mask`` is dropout's."""
    hidden = mask * jax.nn.relu(x @ params["first"]["kernel"] + params["first"]["bias"])
    return hidden @ params["second"]["kernel"] + params["second"]["bias"]


def example_losses(params: Any, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Cross entropies in nats, without dropout."""
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, batch[0]), batch[1])


@functools.partial(jax.jit, static_argnames=("batch_size", "epochs", "classes"))
def train(
    setting: Mapping[str, jax.Array],
    x: jax.Array,
    y: jax.Array,
    *,
    batch_size: int,
    epochs: int,
    classes: int,
) -> Any:
    """Trains one network for every entry of the vectors in ``setting``, side by side."""
    steps = epochs * (len(x) // batch_size)

    def one(rate: Any, decay: Any, dropout: Any, seed: Any) -> Any:
        keys = jax.random.split(jax.random.key(seed), 3)
        shapes = {"first": (x.shape[1], WIDTH), "second": (WIDTH, classes)}
        params: Any = {
            name: {
                "kernel": jax.random.normal(key, shape) * (2 / shape[0]) ** 0.5,
                "bias": jnp.zeros(shape[1]),
            }
            for key, (name, shape) in zip(keys, shapes.items(), strict=False)
        }
        tx = optax.chain(
            optax.add_decayed_weights(decay),
            optax.trace(MOMENTUM),
            optax.scale_by_learning_rate(lambda t: rate * (1 + jnp.cos(jnp.pi * t / steps)) / 2),
        )

        def step(carry: Any, t: jax.Array) -> tuple[Any, None]:
            params, state = carry
            choose, drop = jax.random.split(jax.random.fold_in(keys[2], t))
            index = jax.random.randint(choose, (batch_size,), 0, len(x))
            kept = jax.random.bernoulli(drop, 1 - dropout, (batch_size, WIDTH)) / (1 - dropout)

            def loss(p: Any) -> jax.Array:
                out = logits(p, x[index], kept)
                return optax.softmax_cross_entropy_with_integer_labels(out, y[index]).mean()

            updates, state = tx.update(jax.grad(loss)(params), state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, tx.init(params)), jnp.arange(steps))[0][0]

    names = "learning rate", "weight decay", "dropout", "seed"
    return jax.vmap(one)(*(setting[name] for name in names))


def train_grid(
    dataset: data.Dataset, y_train: np.ndarray, seeds: int, epochs: int
) -> tuple[Any, dict[str, list[Any]]]:
    """Stacked params of all networks, and the columns of their hyperparameters."""
    x = jnp.asarray(dataset.x_train.reshape(len(dataset.x_train), -1))
    stacks: list[Any] = []
    columns: dict[str, list[Any]] = {name: [] for name in (*GRID, "seed")}
    for batch_size in GRID["batch size"]:
        rest = [*itertools.product(*list(GRID.values())[1:], range(seeds))]
        setting = {
            name: np.array(values)
            for name, values in zip([*GRID, "seed"][1:], zip(*rest, strict=True), strict=True)
        }
        stacks.append(
            train(
                setting,
                x,
                jnp.asarray(y_train),
                batch_size=int(batch_size),
                epochs=epochs,
                classes=dataset.classes,
            )
        )
        columns["batch size"] += [batch_size] * len(rest)
        for name, values in setting.items():
            columns[name] += values.tolist()
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *stacks), columns


def measure_all(
    loss: analysis.DatasetLoss, networks: Any, steps: int
) -> dict[str, dict[float, np.ndarray]]:
    """For each measure and radius, the values of all networks."""
    found: dict[str, dict[float, np.ndarray]] = {}
    for name, (measure, options, radii) in MEASURES.items():

        @jax.jit
        def of_all(rho: Any, networks: Any, measure: Any = measure, options: Any = options) -> Any:
            def one(params: Any) -> jax.Array:
                return measure(loss, params, rho, steps=steps, restarts=0, **options).value

            return jax.lax.map(one, networks)

        found[name] = {rho: np.asarray(of_all(rho, networks)) for rho in radii}
    return found


def interval(
    values: np.ndarray, gap: np.ndarray, groups: Sequence[Any], other: np.ndarray | None = None
) -> tuple[float, float]:
    """95 % bootstrap interval of τ (or of its excess over another measure's) over settings."""
    rng = np.random.default_rng(0)
    labels = {group: i for i, group in enumerate(dict.fromkeys(groups))}
    members = [np.flatnonzero([labels[g] == i for g in groups]) for i in range(len(labels))]
    taus = []
    for _ in range(BOOTSTRAPS):
        runs = np.concatenate([members[i] for i in rng.integers(len(members), size=len(members))])
        tau = analysis.kendall_tau(values[runs], gap[runs])
        taus.append(tau if other is None else tau - analysis.kendall_tau(other[runs], gap[runs]))
    low, high = np.quantile(taus, [0.025, 0.975])
    return float(low), float(high)


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains, measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m sam_optax.experiments.ranks")
    parser.add_argument("--dataset", default="digits", help="digits or mnist5k")
    parser.add_argument("--label-noise", type=float, default=0.0, help="share of wrong labels")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--ascent-steps", type=int, default=5)
    options = parser.parse_args(arguments)
    dataset = data.load(options.dataset)
    # A gap between two samples of one distribution: test labels are as wrong as training labels.
    rng = np.random.default_rng(0)
    y_train, y_test = (
        data.corrupt(y, options.label_noise, dataset.classes, rng)
        for y in (dataset.y_train, dataset.y_test)
    )
    networks, columns = train_grid(dataset, y_train, options.seeds, options.epochs)

    def loss_on(x: np.ndarray, y: np.ndarray) -> analysis.DatasetLoss:
        arrays = jnp.asarray(x.reshape(len(x), -1)), jnp.asarray(y)
        return analysis.DatasetLoss.from_examples(example_losses, arrays, 2000)

    train_loss, test_loss = (
        loss_on(dataset.x_train, y_train),
        loss_on(dataset.x_test, y_test),
    )
    losses = [np.asarray(jax.lax.map(f, networks)) for f in (train_loss, test_loss)]
    gap = losses[1] - losses[0]
    # The training loss needs no ascent: what a measure of sharpness has to beat.
    values = {
        "training loss": {0.0: losses[0]},
        **measure_all(train_loss, networks, options.ascent_steps),
    }
    fine = np.isfinite([gap, *(v for radii in values.values() for v in radii.values())]).all(axis=0)
    columns = {name: list(np.array(column)[fine]) for name, column in columns.items()}
    gap = gap[fine]
    print(
        f"{dataset.name}: {len(gap)} networks ({(~fine).sum()} diverged), {options.seeds} seeds, "
        f"{options.label_noise:.0%} wrong labels; training loss {losses[0][fine].min():.3g} to "
        f"{losses[0][fine].max():.3g}, gap {gap.min():.3g} to {gap.max():.3g} nats\n"
    )
    print(CONVENTION + "\n")
    settings = list(zip(*(columns[name] for name in GRID), strict=True))
    best: dict[str, np.ndarray] = {}
    rows = [["measure", "ρ", "τ", "95 %", *GRID, "Ψ"]]
    for name, radii in values.items():
        for rho, value in radii.items():
            found = analysis.rank_statistics(value[fine], gap, columns, hold=("seed",))
            low, high = interval(value[fine], gap, settings)
            coefficients = [f"{found.psi[key]:.3f}" for key in GRID]
            rows.append(
                [
                    name,
                    f"{rho:g}" if rho else "–",
                    f"{found.tau:.3f}",
                    f"{low:.2f} to {high:.2f}",
                    *coefficients,
                    f"{found.average:.3f}",
                ]
            )
        best[name] = max(
            (value[fine] for value in radii.values()), key=lambda v: analysis.kendall_tau(v, gap)
        )
    print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    print("\n".join("| " + " | ".join(row) + " |" for row in rows[1:]))
    for name in (name for name in best if name.startswith("sharpness")):
        plain, adaptive = best[name], best[f"adaptive {name}"]
        low, high = interval(adaptive, gap, settings, plain)
        excess = analysis.kendall_tau(adaptive, gap) - analysis.kendall_tau(plain, gap)
        print(
            f"\nτ of adaptive {name} − τ of {name}, each at its best ρ: {excess:.3f} "
            f"(95 % of bootstraps over settings: {low:.3f} to {high:.3f})"
        )


if __name__ == "__main__":
    main()
