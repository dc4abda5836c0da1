"""Rank statistics against a transcription of their definitions."""

import itertools
import math

import numpy as np
import pytest

from sam_optax import analysis


def signs(measure, gap):
    """τ by its definition, for values without ties."""
    pairs = list(itertools.combinations(range(len(gap)), 2))
    signs = [np.sign((measure[i] - measure[j]) * (gap[i] - gap[j])) for i, j in pairs]
    return np.mean(signs)


def grid(seed=0):
    rng = np.random.default_rng(seed)
    settings = list(itertools.product([16, 64, 256], [0.1, 0.01], ["none", "strong"]))
    columns = dict(zip(("batch", "rate", "decay"), zip(*settings, strict=True), strict=True))
    return rng.normal(size=12), rng.normal(size=12), columns


@pytest.mark.parametrize("seed", range(3))
def test_tau(seed):
    measure, gap, _ = grid(seed)
    assert analysis.kendall_tau(measure, gap) == pytest.approx(signs(measure, gap))
    assert analysis.kendall_tau(measure, np.exp(measure)) == pytest.approx(1)
    assert analysis.kendall_tau(measure, -(measure**3)) == pytest.approx(-1)


def test_granulated_coefficients():
    measure, gap, columns = grid()
    found = analysis.rank_statistics(measure, gap, columns)
    measure, gap = measure.reshape(3, 2, 2), gap.reshape(3, 2, 2)
    psi = [
        np.mean(
            [
                signs(m, g)
                for m, g in zip(
                    np.moveaxis(measure, axis, -1).reshape(-1, measure.shape[axis]),
                    np.moveaxis(gap, axis, -1).reshape(-1, measure.shape[axis]),
                    strict=True,
                )
            ]
        )
        for axis in range(3)
    ]
    assert list(found.psi) == ["batch", "rate", "decay"]
    np.testing.assert_allclose(list(found.psi.values()), psi)
    assert found.average == pytest.approx(np.mean(psi))
    assert found.groups == {"batch": 4, "rate": 6, "decay": 6}
    assert found.skipped == {"batch": 0, "rate": 0, "decay": 0}


def test_a_measure_that_only_detects_a_hyperparameter():
    """The reason for granulated coefficients: τ is high, Ψ is not."""
    rng = np.random.default_rng(1)
    rate = np.repeat([0.0, 10.0], 40)
    decay = np.tile(np.arange(40), 2)
    gap = rate + rng.normal(size=80)
    measure = rate + 0.1 * rng.normal(size=80)
    found = analysis.rank_statistics(measure, gap, {"rate": rate, "decay": decay})
    assert found.tau > 0.4
    assert found.psi["rate"] == 1
    assert abs(found.psi["decay"]) < 0.2


def test_order_of_runs_does_not_matter():
    measure, gap, columns = grid()
    order = np.random.default_rng(2).permutation(12)
    shuffled = {name: [values[i] for i in order] for name, values in columns.items()}
    found = analysis.rank_statistics(measure[order], gap[order], shuffled)
    expected = analysis.rank_statistics(measure, gap, columns)
    assert found.psi == pytest.approx(expected.psi)
    assert found.tau == pytest.approx(expected.tau)


def test_seeds_are_held():
    measure, gap, columns = grid()
    twice = {name: list(values) * 2 for name, values in columns.items()}
    with pytest.raises(ValueError, match="hold=\\('seed',\\)"):
        analysis.rank_statistics([*measure, *gap], [*gap, *measure], twice)
    seeds = twice | {"seed": [0] * 12 + [1] * 12}
    found = analysis.rank_statistics([*measure, *gap], [*gap, *measure], seeds, hold=("seed",))
    once = analysis.rank_statistics(measure, gap, columns)
    assert found.psi == pytest.approx(once.psi)
    assert "seed" not in found.psi
    assert found.groups["batch"] == 8


def test_ties_and_degenerate_groups():
    assert math.isnan(analysis.kendall_tau([1.0, 1.0], [1.0, 2.0]))
    assert math.isnan(analysis.kendall_tau([1.0], [1.0]))
    assert analysis.kendall_tau([1, 1, 2], [1, 1, 2]) == pytest.approx(1)
    # One tie in μ alone: 2 of 3 pairs agree, over √(2 · 3).
    assert analysis.kendall_tau([1, 1, 2], [1, 2, 3]) == pytest.approx(2 / math.sqrt(6))
    found = analysis.rank_statistics(
        [1.0, 1.0, 1.0, 2.0, 5.0],
        [1.0, 2.0, 3.0, 4.0, 5.0],
        {"rate": [1, 2, 1, 2, 1], "decay": [0, 0, 1, 1, 2]},
    )
    # With decay 0 the measure ties, with decay 2 there is one run.
    assert found.psi["rate"] == 1
    assert (found.groups["rate"], found.skipped["rate"]) == (1, 2)
    nothing = analysis.rank_statistics([1.0, 2.0], [1.0, 2.0], {"rate": [1, 2], "decay": [0, 1]})
    assert math.isnan(nothing.average)
    assert all(math.isnan(value) for value in nothing.psi.values())


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([1.0], [1.0, 2.0], {"a": [1]}), {}, "one length"),
        (
            ([1.0, math.nan], [1.0, 2.0], {"a": [1, 2]}),
            {},
            "measure must be finite, got nan .* run 1",
        ),
        (([1.0, 2.0], [1.0, math.inf], {"a": [1, 2]}), {}, "gap must be finite"),
        (([1.0, 2.0], [1.0, 2.0], {"a": [1]}), {}, "each of the 2 runs, got 1"),
        (([1.0, 2.0], [1.0, 2.0], {}), {}, "at least one"),
        (([1.0, 2.0], [1.0, 2.0], {"a": [1, 2]}), {"hold": ("b",)}, r"hold has \['b'\]"),
    ],
)
def test_errors(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        analysis.rank_statistics(*arguments, **options)
