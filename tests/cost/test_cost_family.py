"""The wider family in the benchmark: against hand-written steps, and the work that is left out."""

import pytest
from cost_programs import cost
from helpers import assert_close, mlp_loss
from test_cost_handwritten import three_steps, too_much

from sam_optax.experiments import bench_handwritten
from sam_optax.experiments.bench_family import FAMILY, FRACTION
from sam_optax.experiments.bench_methods import base_step

pytestmark = pytest.mark.slow

BY_HAND = [name for name, entry in FAMILY.items() if entry.handwritten is not None]
# Gradients a step evaluates; those of a branch are counted with it.
GRADIENTS = {"part": 1 + FRACTION, "momentum": 1, "low_pass": 1, "looksam": 2, "every": 2}


@pytest.mark.parametrize("name", BY_HAND)
def test_costs_what_a_handwritten_step_costs(name):
    entry = FAMILY[name]
    assert not too_much(entry.library, entry.handwritten)


@pytest.mark.parametrize("name", FAMILY)
def test_evaluates_no_more_gradients_than_it_should(name):
    """FLOPs are those of matrix products, but for some per cent."""
    measured = cost(FAMILY[name].library).flops / cost(base_step).flops
    assert measured == pytest.approx(GRADIENTS.get(name, 2), rel=0.04)


@pytest.mark.parametrize("name", BY_HAND)
def test_handwritten_steps_take_the_same_step(name):
    def loss(params, batch):
        return mlp_loss(params, *batch)

    entry = FAMILY[name]
    (ours, _), (theirs, _) = (three_steps(of(loss)) for of in entry[:2])
    assert_close(ours, theirs, rtol=1e-5)
    with pytest.raises(AssertionError):
        assert_close(ours, three_steps(bench_handwritten.sgd(loss))[0], rtol=1e-6)
