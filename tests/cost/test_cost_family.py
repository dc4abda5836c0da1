"""The wider family: against hand-written steps, and the work that is left out."""

from pathlib import Path

import jax
import optax
import pytest
from cost_programs import base_step, cost, handwritten, library, perturbation, ratios
from helpers import assert_close, mlp_loss
from more_by_hand import LIBRARY
from more_by_hand import METHODS as HANDWRITTEN
from test_cost_handwritten import three_steps, too_much

import sam_optax
from sam_optax.experiments import named
from sam_optax.experiments.cost.steps import variant

pytestmark = pytest.mark.slow

# Methods of the default have tests of their own; nothing but the mask of ESAM is measured here.
BY_HAND = [name for name in HANDWRITTEN if name not in ("sgd", "asam", "fsam", "rsam")]
MORE = Path(__file__).parents[2] / "notebooks" / "methods.py"
OTHERS = ["vasso", "wsam", "looksam", "msam", "skip_nonfinite", f"{MORE}:ssam_f"]
OTHERS += [f"{MORE}:low_pass"]
MAKERS = {name: library(name) for name in BY_HAND + OTHERS}
MAKERS["random_mask"] = perturbation(
    lambda: sam_optax.as_perturbation(
        optax.chain(sam_optax.sam(0.05), sam_optax.random_mask(0.6, key=jax.random.key(0)))
    )
)


@pytest.mark.parametrize("name", BY_HAND)
def test_costs_what_a_handwritten_step_costs(name):
    assert not too_much(library(name), handwritten(name))


def test_skipping_costs_a_pass_over_the_gradient_and_the_updates():
    """The norm of the ascent gradient is known; the update is decided on before it is made."""
    added = ratios(library("sam", skip_nonfinite=True), handwritten("sam"))
    assert added["flops"] < 1.005
    assert added["bytes accessed"] < 1.15


@pytest.mark.parametrize("name", MAKERS, ids=named.short)
def test_evaluates_no_more_gradients_than_it_should(name):
    """FLOPs are those of matrix products, but for some per cent; of branches, both are counted."""
    known = name not in ("every", "looksam", "random_mask")
    gradients = variant(name, **LIBRARY.get(name, {})).gradients(1) if known else 2
    measured = cost(MAKERS[name])["flops"] / cost(base_step)["flops"]
    assert measured == pytest.approx(gradients, rel=0.04)


@pytest.mark.parametrize("name", BY_HAND)
def test_handwritten_steps_take_the_same_step(name):
    def loss(params, batch):
        return mlp_loss(params, *batch)

    (ours, _), (theirs, _) = (three_steps(of(loss)) for of in (library(name), handwritten(name)))
    assert_close(ours, theirs, rtol=1e-5)
    with pytest.raises(AssertionError):
        assert_close(ours, three_steps(handwritten("sgd")(loss))[0], rtol=1e-6)
