"""The wider family: against hand-written steps, and the work that is left out."""

import jax
import optax
import pytest
from cost_programs import base_step, cost, handwritten, library, perturbation
from helpers import assert_close, mlp_loss
from more_by_hand import FRACTION, MORE
from test_cost_handwritten import three_steps, too_much

import sam_optax
from sam_optax.experiments.cost.handwritten import HANDWRITTEN
from sam_optax.experiments.cost.steps import METHODS

pytestmark = pytest.mark.slow

# Methods of the default have tests of their own; nothing but the mask of ESAM is measured here.
MAKERS = {
    name: library(name)
    for name in (
        "gsam",
        "fisher_sam",
        "vasso",
        "wsam",
        "ssam_f",
        "looksam",
        "every",
        "part",
        "momentum",
        "info",
        "skip_nonfinite",
        "low_pass",
    )
}
MAKERS["random_mask"] = perturbation(
    lambda: sam_optax.as_perturbation(
        optax.chain(sam_optax.sam(0.05), sam_optax.random_mask(0.6, key=jax.random.key(0)))
    )
)
BY_HAND = [name for name in MAKERS if name in {*HANDWRITTEN, *MORE}]
# Gradients a step evaluates; those of a branch are counted with it.
GRADIENTS = {"part": 1 + FRACTION, "momentum": 1, "low_pass": 1, "looksam": 2, "every": 2}


@pytest.mark.parametrize("name", BY_HAND)
def test_costs_what_a_handwritten_step_costs(name):
    assert not too_much(library(name), handwritten(name))


@pytest.mark.parametrize("name", MAKERS)
def test_evaluates_no_more_gradients_than_it_should(name):
    """FLOPs are those of matrix products, but for some per cent."""
    measured = cost(MAKERS[name])["flops"] / cost(base_step)["flops"]
    assert measured == pytest.approx(GRADIENTS.get(name, 2), rel=0.04)


@pytest.mark.parametrize("name", BY_HAND)
def test_handwritten_steps_take_the_same_step(name):
    def loss(params, batch):
        return mlp_loss(params, *batch)

    (ours, _), (theirs, _) = (three_steps(of(loss)) for of in (library(name), handwritten(name)))
    assert_close(ours, theirs, rtol=1e-5)
    with pytest.raises(AssertionError):
        assert_close(ours, three_steps(handwritten("sgd")(loss))[0], rtol=1e-6)


def test_every_handwritten_step_is_of_a_method():
    assert {*HANDWRITTEN, *MORE} <= {"sgd", *METHODS}
    assert {*HANDWRITTEN, *MORE} == {"sgd", "sam", "asam", "fsam", "rsam", *BY_HAND}
