"""The abstraction costs nothing: each method against a step written by hand for it alone."""

import jax
import jax.numpy as jnp
import optax
import pytest
from cost_programs import METHODS, handwritten, library, mean, perturbation, ratios
from helpers import assert_close, init_mlp, mlp_loss
from jax.flatten_util import ravel_pytree
from more_by_hand import METHODS as HANDWRITTEN
from more_by_hand import contrib

import sam_optax
from sam_optax.experiments.cost.command import Cost
from sam_optax.experiments.cost.steps import Step

pytestmark = pytest.mark.slow

# What is allowed above the hand-written step.
ALLOWED = {"flops": 0.005, "bytes accessed": 0.02, "temporaries": 0.02}
# A hand-written step that costs much more than the library's would prove nothing.
SLACK_OF_REFERENCE = 0.1
# R-SAM's hand-written step is the naive one; test_cost_rsam compares with SAM's instead.
COMPARED = [name for name in HANDWRITTEN if name not in ("sgd", "rsam")]


def too_much(make, reference):
    """The counts that exceed the reference's by more than is allowed, as ratios."""
    measured = ratios(make, reference)
    return {name: measured[name] for name, most in ALLOWED.items() if measured[name] > 1 + most}


@pytest.mark.parametrize("method", COMPARED)
def test_costs_what_a_handwritten_step_costs(method):
    assert not too_much(library(method), handwritten(method))
    measured = ratios(library(method), handwritten(method))
    assert all(measured[name] > 1 - SLACK_OF_REFERENCE for name in ALLOWED), measured


def test_skipping_costs_a_pass_over_the_gradient_and_the_updates():
    """The norm of the ascent gradient is known; the update is decided on before it is made."""
    added = ratios(library("sam", skip_nonfinite=True), handwritten("sam"))
    assert added["flops"] < 1.005
    assert added["bytes accessed"] < 1.15


def test_sam_costs_no_more_than_optax_contrib_sam():
    assert not too_much(library("sam"), contrib)


# Negative controls: what is written without care.


def asam_scaling(params):
    return jax.tree_util.tree_map_with_path(
        lambda path, w: jnp.ones_like(w) if path[-1].key == "bias" else jnp.abs(w) + 0.01, params
    )


def asam_on_a_concatenated_tree():
    def displacement(grads, params):
        g, unravel = ravel_pytree(grads)
        t, _ = ravel_pytree(asam_scaling(params))
        return unravel(0.5 * t * t * g / jnp.linalg.norm(t * g))

    return sam_optax.as_perturbation(optax.stateless(displacement))


def test_a_careless_formula_costs_too_much():
    found = too_much(perturbation(asam_on_a_concatenated_tree), handwritten("asam"))
    assert {"bytes accessed", "temporaries"} <= found.keys()


def test_a_further_gradient_costs_too_much():
    def takes_the_ascent_gradient_again(losses):
        base = handwritten("sam")(losses)

        def step(params, state, batch):
            value, grads = jax.value_and_grad(mean(losses))(params, batch)
            same = jax.tree.map(lambda w, g: w + 0.0 * g, params, grads)
            params, state, _ = base.step(same, state, batch)
            return params, state, value

        return Step(base.init, step)

    found = too_much(takes_the_ascent_gradient_again, handwritten("sam"))
    assert found["flops"] == pytest.approx(1.5, abs=0.01)


# The hand-written steps do the same work: they compute the same thing.


def three_steps(step):
    params, batch = init_mlp(), (jnp.ones((5, 3)), jnp.ones((5, 2)))
    state, jitted, value = step.init(params), jax.jit(step.step), None
    for _ in range(3):
        params, state, value = jitted(params, state, batch)
    return params, value


@pytest.mark.parametrize("method", COMPARED)
def test_handwritten_steps_take_the_same_step(method):
    def loss(params, batch):
        return mlp_loss(params, *batch)

    params, value = three_steps(handwritten(method)(loss))
    ours, our_value = three_steps(library(method)(loss))
    assert_close(ours, params, rtol=1e-5)
    assert value is None or float(our_value) == pytest.approx(float(value), rel=1e-5)
    with pytest.raises(AssertionError):
        assert_close(ours, three_steps(handwritten("sgd")(loss))[0], rtol=1e-6)
    if method == "sam":
        assert_close(three_steps(contrib(loss)), (params, value), rtol=1e-5)


def test_handwritten_rsam_without_noise_is_sam():
    def loss(params, batch):
        return mlp_loss(params, *batch)

    params, _ = three_steps(handwritten("rsam", rho=0.05, gamma=0.0)(loss))
    assert_close(params, three_steps(handwritten("sam", rho=0.05)(loss))[0], rtol=1e-5)


def test_every_method_of_the_command_is_compared():
    """A new method needs a place in these tests too."""
    assert set(METHODS) == set(Cost().methods) <= {*COMPARED, "rsam"}
