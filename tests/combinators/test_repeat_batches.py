"""`repeat_batches`: each batch as often as the step of `alternating` takes calls."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import needs_partition
from methods import make

import sam_optax
from sam_optax import alternating, eval_params, repeat_batches

BASE, SAM = optax.sgd(0.1), sam_optax.sam(0.1)
W = jnp.array([3.0, 4.0])


class Loop:
    """A training loop that knows nothing of the calls that a step takes."""

    def __init__(self, tx, params=W):
        self.tx, self.params, self.state, self.seen = tx, params, tx.init(params), []

    def call(self, x):
        grads = jax.tree.map(lambda w: x * w, self.params)
        updates, self.state = self.tx.update(grads, self.state, self.params)
        self.params = optax.apply_updates(self.params, updates)
        self.seen.append(float(x))

    def run(self, batches, **options):
        for x in repeat_batches(batches, lambda: self.state, **options):
            self.call(x)
            assert len(self.seen) < 20, "it goes on for ever"
        return self.seen


PATTERNS = {
    # name -> perturbation, options, calls for each of four batches
    "sam": (SAM, {}, [2, 2, 2, 2]),
    "random start": (make("rsam"), {}, [3, 2, 2, 2]),
    "single pass": (make("momentum"), {}, [2, 1, 1, 1]),
    "when": (SAM, {"when": sam_optax.every(3)}, [2, 1, 1, 2]),
    "random start, later": (make("rsam"), {"when": sam_optax.after(2)}, [1, 1, 2, 2]),
    "never": (SAM, {"when": lambda step: step < 0}, [1, 1, 1, 1]),
}


@pytest.mark.parametrize(("perturbation", "options", "counts"), PATTERNS.values(), ids=PATTERNS)
def test_batches_get_the_calls_of_their_step(perturbation, options, counts):
    loop = Loop(alternating(BASE, perturbation, **options))
    assert loop.run(iter([1, 2, 3, 4])) == list(np.repeat([1, 2, 3, 4], counts))
    assert int(loop.state.step) == 4


@pytest.mark.parametrize(("x", "calls"), [(jnp.inf, 1), (1e18, 2)])
def test_a_step_that_is_given_up_takes_the_calls_that_it_got(x, calls):
    """Its first gradient, x, is infinite, or the second one, 1e21 x."""
    loop = Loop(alternating(BASE, sam_optax.sam(1e21), skip_nonfinite=True), jnp.array(1.0))
    assert loop.run([x, 3.0]) == pytest.approx([*[x] * calls, 3, 3])
    assert int(loop.state.skipped) == 1


def test_an_epoch_ends_between_two_steps_and_the_next_goes_on():
    loop = Loop(alternating(BASE, make("rsam")))
    loop.run([1.0, 2.0])
    assert loop.run([3.0]) == [1, 1, 1, 2, 2, 3, 3]


def test_a_run_resumed_between_two_calls_finishes_its_step():
    loop = Loop(alternating(BASE, SAM))
    loop.call(1.0)
    assert loop.run([1.0, 2.0]) == [1, 1, 2, 2]


def test_microbatches_are_repeated_together():
    """L_i = ½ a_i w², a = (1, 3), ρ = 0.1, rate 0.5: both gradients are means over the two."""
    tx = optax.MultiSteps(alternating(optax.sgd(0.5), SAM), 2)
    loop = Loop(tx, jnp.array(1.0))
    seen = loop.run([1.0, 3.0, 5.0], microbatches=2)
    assert seen == [1, 3, 1, 3]  # the last one fills no step
    np.testing.assert_allclose(eval_params(loop.params, loop.state), 1 - 0.5 * 2.2, atol=1e-6)


def test_a_call_that_was_dropped_outside_is_not_repeated():
    loop = Loop(optax.apply_if_finite(alternating(BASE, SAM), 10))
    seen = loop.run([1.0, jnp.nan, 3.0])
    assert [x for x in seen if x == x] == [1, 1, 3, 3]
    assert len(seen) == 5


@needs_partition
def test_labels_of_a_partition_have_to_keep_step():
    def loop(**other):
        transforms = {"a": alternating(BASE, SAM), "b": alternating(BASE, SAM, **other)}
        return Loop(optax.partition(transforms, {"a": "a", "b": "b"}), {"a": W, "b": W})

    assert loop().run([1.0, 2.0]) == [1, 1, 2, 2]
    with pytest.raises(ValueError, match=r"different phases.*\(step, phase\)"):
        loop(when=lambda step: step < 0).run([1.0, 2.0])


def test_runs_side_by_side_take_their_calls_together():
    tx = alternating(BASE, SAM)
    together = optax.GradientTransformation(jax.vmap(tx.init), jax.vmap(tx.update))
    loop = Loop(together, jnp.stack([W, W]))
    assert loop.run([1.0, 2.0]) == [1, 1, 2, 2]
    loop.state = loop.state._replace(step=jnp.array([0, 1]))
    with pytest.raises(ValueError, match=r"runs in this state differ: \[0, 1\]"):
        loop.run([1.0])


STATE = alternating(BASE, SAM).init(W)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: repeat_batches([1.0], STATE), "lambda: state, got AlternatingState"),
        (lambda: repeat_batches([1.0], lambda: STATE, microbatches=0), "microbatches"),
        (lambda: next(repeat_batches([1.0], lambda: BASE.init(W))), "contains alternating.*tuple"),
        (lambda: list(repeat_batches([1.0], lambda: STATE)), "state from before the last call"),
    ],
)
def test_errors_say_what_to_pass(call, match):
    with pytest.raises((TypeError, ValueError), match=match):
        call()
