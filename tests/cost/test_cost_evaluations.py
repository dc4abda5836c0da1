"""How many gradients a step evaluates, and how often the loss is traced."""

import jax
import jax.numpy as jnp
import optax
import pytest
from cost_programs import METHODS, PROBLEMS, base_step, cost, handwritten, library, program
from helpers import Counted, init_mlp, mlp_loss
from methods import often

import sam_optax

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


# Traces: Python calls of the loss while a step is traced.


def traces(method, *, pass_gradient, **options):
    loss = Counted(lambda params: mlp_loss(params, jnp.ones((5, 3)), jnp.ones((5, 2))))
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), method, **options)

    @jax.jit
    def step(params, state):
        grads = jax.value_and_grad(loss)(params)[1] if pass_gradient else None
        return tx.update(grads, state, params, grad_fn=jax.grad(loss))

    params = init_mlp()
    step.lower(params, tx.init(params))
    return loss.calls


OPTIONS = {
    "plain": {},
    "when": {"when": EVERY_2},
    "two ascent steps": {"ascent_steps": 2},
    "five ascent steps": {"ascent_steps": 5},
    "skip nonfinite": {"skip_nonfinite": True},
}


@pytest.mark.parametrize("pass_gradient", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("method", often(METHODS, "sam"))
def test_the_loss_is_traced_once_and_once_more_for_a_gradient_of_the_callers(
    method, options, pass_gradient
):
    found = traces(METHODS[method](), pass_gradient=pass_gradient, **OPTIONS[options])
    assert found == 1 + pass_gradient
