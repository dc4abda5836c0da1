"""The radius tied to the learning rate, as in GSAM."""

import jax
import optax
import pytest

import sam_optax


@pytest.mark.parametrize(
    ("lr", "expected"),
    [(0.0, 0.0), (1e-4, 0.0), (1e-3, 0.1), (5.5e-4, 0.05), (2.8e-4, 0.02), (2e-3, 0.1)],
)
def test_known_rates(lr, expected):
    rho = sam_optax.rho_from_learning_rate(lambda t: lr, 0.0, 0.1, 1e-4, 1e-3)
    assert float(rho(0)) == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize(("lr", "expected"), [(0.0, 0.02), (0.05, 0.02), (0.1, 0.3), (0.2, 0.3)])
def test_equal_learning_rates_divide_by_nothing(lr, expected):
    rho = sam_optax.rho_from_learning_rate(lambda t: lr, 0.02, 0.3, 0.1, 0.1)
    assert float(jax.jit(rho)(0)) == pytest.approx(expected)


def test_radii_may_be_traced():
    lr = optax.linear_schedule(0.1, 0.01, 10)
    radius = lambda low, high: sam_optax.rho_from_learning_rate(lr, low, high, 0, 0.1)(4)
    jitted = jax.jit(radius)
    for low, high in ((0.0, 0.1), (0.2, 0.8)):
        assert float(jitted(low, high)) == pytest.approx(float(radius(low, high)), rel=1e-6)
        given = jax.jit(lambda low, high=high: radius(low, high))  # only one of them
        assert float(given(low)) == float(jitted(low, high))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"schedule": 0.1}, TypeError, "schedule must be .*0.1.*constant rho"),
        ({"rho_min": -0.1}, ValueError, r"rho_min must be in \[0, inf\), got -0.1"),
        ({"rho_max": 0.01}, ValueError, r"rho_max must be in \[0.05, inf\), got 0.01"),
        ({"lr_min": -1}, ValueError, r"lr_min must be in \[0, inf\), got -1"),
        ({"lr_max": 1e-5}, ValueError, r"lr_max must be in \[0.0001, inf\), got 1e-05"),
        ({"rho_max": lambda t: 0.1}, TypeError, "rho_max must be"),
    ],
)
def test_bad_arguments(arguments, error, message):
    good = {"rho_min": 0.05, "rho_max": 0.1, "lr_min": 1e-4, "lr_max": 1e-3}
    with pytest.raises(error, match=message):
        sam_optax.rho_from_learning_rate(**{"schedule": lambda t: 0.1, **good, **arguments})
