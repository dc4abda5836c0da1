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


def test_tau():
    measure, gap, _ = grid(1)
    assert analysis.kendall_tau(measure, gap) == pytest.approx(signs(measure, gap))
    assert analysis.kendall_tau(measure, np.exp(measure)) == pytest.approx(1)
    assert analysis.kendall_tau(measure, -(measure**3)) == pytest.approx(-1)


def test_granulated_coefficients():
    """In any order of the runs."""
    measure, gap, columns = grid()
    psi = {}
    for axis, name in enumerate(columns):
        pairs = (np.moveaxis(x.reshape(3, 2, 2), axis, -1) for x in (measure, gap))
        rows = zip(*(x.reshape(-1, x.shape[-1]) for x in pairs), strict=True)
        psi[name] = np.mean([signs(m, g) for m, g in rows])
    order = np.random.default_rng(2).permutation(12)
    shuffled = {name: [values[i] for i in order] for name, values in columns.items()}
    found = analysis.rank_statistics(measure[order], gap[order], shuffled)
    assert found.psi == pytest.approx(psi)
    assert found.tau == pytest.approx(signs(measure, gap))
    assert found.average == pytest.approx(np.mean(list(psi.values())))
    assert found.groups == {"batch": 4, "rate": 6, "decay": 6}
    assert found.skipped == {"batch": 0, "rate": 0, "decay": 0}


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
