"""`repeat_batches`: each batch as often as the step of `alternating` takes calls."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same, needs_partition

import sam_optax
from sam_optax import alternating, eval_params, repeat_batches

KEY = jax.random.key(0)
BASE = optax.sgd(0.1)
W = jnp.array([3.0, 4.0])
BATCHES = [1.0, 2.0, 3.0, 4.0]


def grad_fn(w, x):
    return x * w * (1 + jnp.sum(w**2))


class Loop:
    """A training loop that knows nothing of the calls that a step takes."""

    def __init__(self, tx, jitted=False):
        self.params, self.state, self.seen = W, tx.init(W), []
        self.update = jax.jit(tx.update) if jitted else tx.update

    def run(self, batches, **options):
        for x in repeat_batches(batches, lambda: self.state, **options):
            updates, self.state = self.update(grad_fn(self.params, x), self.state, self.params)
            self.params = optax.apply_updates(self.params, updates)
            self.seen.append(float(x))
        return self

    def counts(self, batches):
        return [self.seen.count(x) for x in batches]


PATTERNS = {
    # name -> perturbation, options, calls for each of four batches
    "sam": (sam_optax.sam(0.1), {}, [2, 2, 2, 2]),
    "random start": (sam_optax.rsam(0.1, 0.1, key=KEY), {}, [3, 2, 2, 2]),
    "single pass": (sam_optax.momentum_start(sam_optax.sam(0.1), 0.9), {}, [2, 1, 1, 1]),
    "when": (sam_optax.sam(0.1), {"when": sam_optax.every(3)}, [2, 1, 1, 2]),
    "random start, later": (
        sam_optax.rsam(0.1, 0.1, key=KEY),
        {"when": sam_optax.after(2)},
        [1, 1, 2, 2],
    ),
    "never": (sam_optax.sam(0.1), {"when": lambda step: step < 0}, [1, 1, 1, 1]),
}


@pytest.mark.parametrize(("perturbation", "options", "counts"), PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.fast("eager-sam", "jit-when")
def test_batches_get_the_calls_of_their_step(perturbation, options, counts, jitted):
    loop = Loop(alternating(BASE, perturbation, **options), jitted).run(iter(BATCHES))
    assert loop.counts(BATCHES) == counts
    assert loop.seen == sorted(loop.seen)
    assert int(loop.state.step) == 4
    # The steps are those of the combinator that takes both gradients itself.
    tx = sam_optax.sharpness_aware(BASE, perturbation, **options)
    w, state = W, tx.init(W)
    for x in BATCHES:
        updates, state = tx.update(None, state, w, grad_fn=functools.partial(grad_fn, x=x))
        w = optax.apply_updates(w, updates)
    np.testing.assert_allclose(eval_params(loop.params, loop.state), w, rtol=1e-5)


def test_a_step_that_is_given_up_at_its_first_gradient_takes_one_call():
    tx = alternating(BASE, sam_optax.sam(0.1), skip_nonfinite=True)
    batches = [1.0, jnp.inf, 3.0]
    loop = Loop(tx).run(batches)
    assert loop.counts(batches) == [2, 1, 2]
    assert int(loop.state.skipped) == 1


def test_an_epoch_ends_between_two_steps_and_the_next_goes_on():
    loop = Loop(alternating(BASE, sam_optax.rsam(0.1, 0.1, key=KEY)))
    loop.run([1.0, 2.0]).run([3.0])
    assert loop.seen == [1, 1, 1, 2, 2, 3, 3]


def test_a_run_resumed_between_two_calls_finishes_its_step():
    loop = Loop(alternating(BASE, sam_optax.sam(0.1)))
    updates, loop.state = loop.update(grad_fn(W, 1.0), loop.state, W)
    loop.params = optax.apply_updates(W, updates)
    assert loop.run([1.0, 2.0]).seen == [1, 2, 2]


def test_microbatches_are_repeated_together():
    """L_i = ½ a_i w², a = (1, 3), ρ = 0.1, rate 0.5: both gradients are means over the two."""
    tx = optax.MultiSteps(alternating(optax.sgd(0.5), sam_optax.sam(0.1)), 2)
    w, state, seen = jnp.array(1.0), tx.init(jnp.array(1.0)), []
    for a in repeat_batches([1.0, 3.0, 5.0], lambda: state, microbatches=2):  # noqa: B023
        updates, state = tx.update(a * w, state, w)
        w = optax.apply_updates(w, updates)
        seen.append(a)
    assert seen == [1, 3, 1, 3]  # the last one fills no step
    np.testing.assert_allclose(eval_params(w, state), 1 - 0.5 * 2.2, atol=1e-6)


def test_a_call_that_was_dropped_outside_is_not_repeated():
    tx = optax.apply_if_finite(alternating(BASE, sam_optax.sam(0.1)), 10)
    loop = Loop(tx, jitted=True).run([1.0, jnp.nan, 3.0])
    assert [x for x in loop.seen if x == x] == [1, 1, 3, 3]
    assert len(loop.seen) == 5


@needs_partition
def test_labels_of_a_partition_have_to_keep_step():
    params = {"a": W, "b": W}
    labels = {"a": "a", "b": "b"}

    def run(**other):
        transforms = {
            "a": alternating(BASE, sam_optax.sam(0.1)),
            "b": alternating(BASE, sam_optax.sam(0.5), **other),
        }
        tx = optax.partition(transforms, labels)
        p, state, seen = params, tx.init(params), []
        for x in repeat_batches([1.0, 2.0], lambda: state):  # noqa: B023
            updates, state = tx.update(jax.tree.map(lambda w: x * w, p), state, p)  # noqa: B023
            p = optax.apply_updates(p, updates)
            seen.append(x)
        return seen

    assert run() == [1, 1, 2, 2]
    with pytest.raises(ValueError, match=r"different phases.*\(step, phase\)"):
        run(when=lambda step: step < 0)


def test_nnx_and_its_own_optimizer_state():
    nnx = pytest.importorskip("flax.nnx")
    if not hasattr(nnx, "to_pure_dict"):
        pytest.skip("the optimizer of this flax keeps its model")
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    tx = alternating(BASE, sam_optax.rsam(0.1, 0.1, key=KEY))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    seen = []

    @nnx.jit
    def step(model, optimizer, x):
        optimizer.update(model, nnx.grad(lambda model: jnp.sum(model(x) ** 2))(model))

    for x in repeat_batches([1.0, 2.0], lambda: optimizer.opt_state):
        step(model, optimizer, jnp.full((1, 2), x))
        seen.append(x)
    assert seen == [1, 1, 1, 2, 2]


@pytest.mark.slow
def test_replicated_state_is_read():
    tx = alternating(BASE, sam_optax.sam(0.1))
    params = jnp.stack([W, W])
    state, seen = jax.vmap(tx.init)(params), []
    for x in repeat_batches([1.0, 2.0], lambda: state):  # noqa: B023
        updates, state = jax.vmap(tx.update)(x * params, state, params)
        params = optax.apply_updates(params, updates)
        seen.append(x)
    assert seen == [1, 1, 2, 2]


def test_runs_side_by_side_that_differ_are_refused():
    when = sam_optax.every(2)
    tx = alternating(BASE, sam_optax.sam(0.1), when=when)
    state = jax.vmap(tx.init)(jnp.stack([W, W]))
    state = state._replace(step=jnp.array([0, 1]))
    with pytest.raises(ValueError, match=r"runs in this state differ: \[0, 1\]"):
        next(repeat_batches([1.0], lambda: state))


def test_errors_say_what_to_pass():
    state = alternating(BASE, sam_optax.sam()).init(W)
    with pytest.raises(TypeError, match=r"lambda: state, got AlternatingState"):
        repeat_batches([1.0], state)
    with pytest.raises(ValueError, match="microbatches"):
        repeat_batches([1.0], lambda: state, microbatches=0)
    with pytest.raises(ValueError, match=r"contains alternating.*got tuple"):
        next(repeat_batches([1.0], lambda: BASE.init(W)))
    forgotten = repeat_batches([1.0, 2.0], lambda: state)
    assert next(forgotten) == 1
    with pytest.raises(ValueError, match="state from before the last call"):
        next(forgotten)


def test_what_is_yielded_is_the_batch_itself():
    batch = {"x": np.ones(2)}
    loop_state = alternating(BASE, sam_optax.sam()).init(W)
    given = next(repeat_batches([batch], lambda: loop_state))
    assert given is batch
    assert_same(given["x"], np.ones(2))
