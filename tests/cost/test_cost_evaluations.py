"""How many gradients a compiled step evaluates."""

from pathlib import Path

import jax
import optax
import pytest
from cost_programs import (
    METHODS,
    PROBLEMS,
    base_step,
    cost,
    handwritten,
    library,
    perturbation,
    program,
    ratios,
)
from methods import often
from more_by_hand import LIBRARY

import sam_optax
from sam_optax.experiments import named
from sam_optax.experiments.cost.steps import variant

MORE = Path(__file__).parents[2] / "notebooks" / "methods.py"
OTHERS = ["sam", *LIBRARY, "info", "looksam", "msam", "skip_nonfinite"]
OTHERS += [f"{MORE}:{name}" for name in ("vasso", "wsam", "ssam_f", "low_pass")]
MAKERS = {name: library(name) for name in OTHERS}
MAKERS["random_mask"] = perturbation(
    lambda: sam_optax.as_perturbation(
        optax.chain(sam_optax.sam(0.05), sam_optax.random_mask(0.6, key=jax.random.key(0)))
    )
)
EVERY_2 = sam_optax.every(2)


def dots_of_a_gradient():
    """Matrix products of one gradient of the MLP: one forward and two backward for each layer,
    but the inputs need no gradient."""
    return 3 * len(jax.eval_shape(PROBLEMS["mlp"]().init)) - 1


def test_the_base_step_evaluates_one_gradient():
    assert program(base_step).count("dot") == dots_of_a_gradient()


@pytest.mark.parametrize("method", often(METHODS, "sam"))
def test_a_step_evaluates_two_gradients(method):
    assert program(library(method)).count("dot") == 2 * dots_of_a_gradient()
    assert program(handwritten(method)).count("dot") == 2 * dots_of_a_gradient()


def test_steps_that_do_not_perturb_evaluate_one_gradient():
    compiled = program(library("sam", when=EVERY_2))
    assert compiled.branches("dot") == [[0, dots_of_a_gradient()]]
    assert compiled.count("dot") == 2 * dots_of_a_gradient()


@pytest.mark.slow
def test_steps_that_do_not_start_at_random_evaluate_one_gradient():
    """A random start has no gradient at the params yet, so the plain branch takes one."""
    compiled = program(library("rsam", when=EVERY_2))
    assert compiled.branches("dot") == [[dots_of_a_gradient(), 2 * dots_of_a_gradient()]]


@pytest.mark.slow
def test_several_ascent_steps_are_one_loop():
    three, eight = (library("sam", ascent_steps=n) for n in (3, 8))
    # The first ascent gradient is given; the loop's body and the descent take one each.
    assert program(eight).count("dot") == 3 * dots_of_a_gradient()
    assert program(eight).count("while") == 1
    assert cost(three)["instructions"] == cost(eight)["instructions"]
    assert cost(three)["temporaries"] == cost(eight)["temporaries"]


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS, ids=named.short)
def test_the_family_evaluates_no_more_gradients_than_it_should(name):
    """FLOPs are those of matrix products, but for some per cent; of branches, both are counted."""
    known = name not in ("every", "looksam", "random_mask")
    gradients = variant(name, **LIBRARY.get(name, {})).gradients(1) if known else 2
    assert ratios(MAKERS[name], base_step)["flops"] == pytest.approx(gradients, rel=0.04)
