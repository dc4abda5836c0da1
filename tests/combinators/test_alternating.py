"""`alternating`: two calls are one step of `sharpness_aware`, in loops that know nothing of it."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    assert_close,
    assert_same,
    batches,
    init_mlp,
    leaves,
    mlp_loss,
    same,
    signature,
    to_numpy,
)
from methods import make

import sam_optax
from sam_optax import AlternatingState, alternating, eval_params

STEPS = 10
GRAD = jax.jit(jax.grad(mlp_loss))

BASES = {
    "sgd": optax.sgd(optax.cosine_decay_schedule(0.02, STEPS), momentum=0.9),
    "adamw": optax.adamw(optax.cosine_decay_schedule(0.01, STEPS), weight_decay=0.1),
}
# Small steps, for params that a step moves by less than half.
OPTIONS = {
    "sam": {},
    "sam_inf": {"rho": 0.01},
    "sam_scheduled": {"start": 0.0},
    "asam": {"rho": 0.1},
    "fsam": {},
    "rsam": {"gamma": 0.02},
    "rsam_scheduled": {"gamma": 0.03, "noise_scale": "norm"},
    "random_asam": {"rho": 0.1, "gamma": 0.02},
    "only_sam": {},
    "fsam_asam": {"rho": 0.1},
}
every_method = pytest.mark.parametrize("name", OPTIONS)


def small(name):
    return make(name, **{"rho": 0.05, **OPTIONS[name]})


def roomy_params():
    """Params in ±[.5, 1.5], which these methods and rates move by less than half: exactly."""
    return jax.tree.map(lambda w: jnp.sign(w) * (0.5 + jnp.abs(w) % 1), init_mlp())


def reference(base, method, params, steps=STEPS, **options):
    """Params and state after each step of `sharpness_aware`."""
    tx = sam_optax.sharpness_aware(base, method, **options)
    state = tx.init(params)
    for x, y in zip(*batches(steps), strict=True):
        updates, state = tx.update(None, state, params, grad_fn=lambda p: GRAD(p, x, y))  # noqa: B023
        params = optax.apply_updates(params, updates)
        yield params, state


class Loop:
    """A training loop that only calls ``update(grads, state, params)``."""

    def __init__(self, tx, params, update=None):
        self.tx, self.params, self.state = tx, params, tx.init(params)
        self.update = tx.update if update is None else update
        self.calls = 0

    def call(self, x, y, **extra):
        grads = GRAD(self.params, x, y)
        updates, self.state = self.update(grads, self.state, self.params, **extra)
        self.params = optax.apply_updates(self.params, updates)
        self.calls += 1

    def step(self, x, y):
        """Calls until the training step is complete."""
        before = int(self.state.step + self.state.skipped)
        while int(self.state.step + self.state.skipped) == before:
            self.call(x, y)

    @property
    def w(self):
        return eval_params(self.params, self.state)


def test_two_calls_are_one_step_of_known_numbers():
    """L = x², ρ = 1: the sharp gradient at 3 is 8; the second call starts at 4 and ends at 2."""
    loop = Loop(alternating(optax.sgd(0.125), sam_optax.sam(1.0)), jnp.array(3.0))
    for expected, w in [(4.0, 3.0), (2.0, 2.0), (3.0, 2.0)]:
        updates, loop.state = loop.tx.update(2 * loop.params, loop.state, loop.params)
        loop.params = optax.apply_updates(loop.params, updates)
        assert (float(loop.params), float(loop.w)) == (expected, w)


@every_method
@pytest.mark.parametrize("base", BASES)
@pytest.mark.fast("sgd-sam", "sgd-rsam")
def test_equals_sharpness_aware_to_the_bit(name, base):
    params = roomy_params()
    loop = Loop(alternating(BASES[base], small(name)), params)
    random_start = small(name).has_start
    for (x, y), (w, state) in zip(
        zip(*batches(STEPS), strict=True), reference(BASES[base], small(name), params), strict=True
    ):
        loop.step(x, y)
        assert_same(loop.w, w)
        assert_same(loop.state.perturbation_state, state.perturbation_state)
        assert_same(loop.state.base_state, state.base_state)
        assert same(loop.params, w) != random_start
    assert loop.calls == 2 * STEPS + random_start
    assert not same(loop.w, params)


@pytest.mark.parametrize("name", ["sam", "rsam"])
def test_the_gradients_points_are_the_right_ones(name):
    """Every call leads where a hand-written loop would take the gradient."""
    method, base = small(name), optax.sgd(0.02, momentum=0.9)
    params = roomy_params()
    loop = Loop(alternating(base, method), params)
    method_state, base_state = method.init(params), base.init(params)
    for i, (x, y) in enumerate(zip(*batches(4), strict=True)):
        if i == 0 and method.has_start:
            loop.call(x, y)
        start = method.start_fn(params, method_state)
        assert_same(loop.params, start)
        perturbed, method_state = method.perturb_fn(params, GRAD(start, x, y), method_state)
        loop.call(x, y)
        assert_same(loop.params, perturbed)
        updates, base_state = base.update(GRAD(perturbed, x, y), base_state, params)
        params = optax.apply_updates(params, updates)
        loop.call(x, y)


def test_another_order_of_calls_would_be_noticed():
    """Negative control: one call too many makes the descent an ascent."""
    params = roomy_params()
    loop = Loop(alternating(BASES["sgd"], sam_optax.sam(0.05)), params)
    x, y = (b[0] for b in batches(1))
    loop.call(x, y)
    w, _ = next(reference(BASES["sgd"], sam_optax.sam(0.05), params, steps=1))
    assert not same(loop.w, w)
    assert_same(loop.w, params)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", ["sam", "rsam"])
@pytest.mark.slow
def test_error_of_a_move_is_bounded_and_does_not_add_up(name, dtype):
    """Small and zero params under large moves: within epsilon × length of each move."""
    params = jax.tree.map(
        lambda w: (w * jnp.abs(w) ** 3).at[..., 0].set(0).astype(dtype), init_mlp()
    )
    method = small(name)
    tx = alternating(optax.sgd(0.3), method)
    loop = Loop(tx, params)
    x, y = batches(12)
    epsilon, inexact = float(jnp.finfo(dtype).eps), 0
    for i in range(24):
        before = loop.params
        loop.call(x[i // 2].astype(dtype), y[i // 2].astype(dtype))
        if loop.state.phase != 0:
            continue
        target = method.start_fn(loop.w, loop.state.perturbation_state)
        for p, t, q in zip(*(leaves(tree) for tree in (before, target, loop.params)), strict=True):
            assert np.all(np.abs(q - t) <= epsilon * np.abs(t - p))
            inexact += np.sum(q != t)
    assert inexact > 0  # the bound had something to bound
    if dtype == jnp.float32:
        *_, (w, _) = reference(optax.sgd(0.3), small(name), params, steps=12)
        if name == "sam":
            assert_close(loop.w, w, rtol=2e-5, atol=1e-6)


WHENS = {
    "every(3)": (sam_optax.every(3), [2, 1, 1, 2, 1, 1, 2]),
    "after(2)": (sam_optax.after(2), [1, 1, 2, 2, 2, 2, 2]),
    "not the first": (lambda step: step % 2 == 1, [1, 2, 1, 2, 1, 2, 1]),
}


@pytest.mark.parametrize("name", ["sam_scheduled", "fsam", "rsam_scheduled"])
@pytest.mark.parametrize(("when", "calls"), WHENS.values(), ids=WHENS)
@pytest.mark.fast("every(3)-sam_scheduled", "not the first-fsam")
@pytest.mark.fast("every(3)-sam_scheduled")
def test_steps_that_do_not_perturb_take_one_call(name, when, calls):
    params = roomy_params()
    loop = Loop(alternating(BASES["sgd"], small(name), when=when), params)
    counts = []
    for (x, y), (w, state) in zip(
        zip(*batches(7), strict=True),
        reference(BASES["sgd"], small(name), params, steps=7, when=when),
        strict=True,
    ):
        before = loop.calls
        loop.step(x, y)
        counts.append(loop.calls - before)
        assert_same(loop.w, w)
        assert_same(loop.state.perturbation_state, state.perturbation_state)
    if small(name).has_start and when(0):
        calls = [calls[0] + 1, *calls[1:]]
    assert counts == calls


@pytest.mark.slow
def test_base_optimizer_to_the_bit_before_perturbing():
    params, base = init_mlp(), BASES["adamw"]
    loop = Loop(alternating(base, small("rsam"), when=lambda _: False), params)
    state = base.init(params)
    for x, y in zip(*batches(4), strict=True):
        loop.call(x, y)
        updates, state = base.update(GRAD(params, x, y), state, params)
        params = optax.apply_updates(params, updates)
        assert_same(loop.w, params)


@pytest.mark.parametrize("name", ["sam_scheduled", "fsam", "rsam_scheduled"])
@pytest.mark.parametrize("when", [None, lambda step: step % 2 == 0], ids=["always", "even"])
@pytest.mark.fast("always-fsam")
def test_a_step_that_is_not_finite_leaves_everything_as_it_was(name, when):
    """Batch 2 fails in its first gradient, batch 4 in its second if it has one."""
    params, options = roomy_params(), {"when": when, "skip_nonfinite": True}
    core = sam_optax.sharpness_aware(BASES["sgd"], small(name), **options)
    core_state, w = core.init(params), params
    loop = Loop(alternating(BASES["sgd"], small(name), **options), params)
    for i, (x, y) in enumerate(zip(*batches(7), strict=True)):

        def grad_fn(p, x=x, y=y, bad=i in (2, 3)):
            grads = GRAD(p, x, y)
            return jax.tree.map(lambda g: g * jnp.nan, grads) if bad else grads

        evaluations = itertools.count()

        def last_fails(p, grad_fn=grad_fn, i=i, evaluations=evaluations):
            grads = grad_fn(p)
            fails = i == 4 and next(evaluations) == 1
            return jax.tree.map(lambda g: g + jnp.inf, grads) if fails else grads

        updates, core_state = core.update(None, core_state, w, grad_fn=last_fails)
        w = optax.apply_updates(w, updates)
        before = int(loop.state.step + loop.state.skipped)
        while int(loop.state.step + loop.state.skipped) == before:
            grads = grad_fn(loop.params)
            if i == 4 and int(loop.state.phase) == 1:
                grads = jax.tree.map(lambda g: g.at[(0,) * g.ndim].set(jnp.inf), grads)
            updates, loop.state = loop.tx.update(grads, loop.state, loop.params)
            loop.params = optax.apply_updates(loop.params, updates)
        assert_same(loop.w, w)
        assert_same(loop.state.perturbation_state, core_state.perturbation_state)
        assert_same(loop.state.base_state, core_state.base_state)
        assert_same(loop.state.skipped, core_state.skipped)
    assert int(loop.state.skipped) == 3


def difference_of_gradients():
    """A descent that needs both gradients."""

    def update(updates, state, params=None, *, ascent_grads, **extra):
        return jax.tree.map(lambda g, a: 0.01 * a - 0.03 * g, updates, ascent_grads), state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)


@pytest.mark.parametrize("when", [None, sam_optax.every(2)], ids=["always", "every(2)"])
def test_ascent_gradient_for_the_descent(when):
    params = roomy_params()
    roles = {"descent": difference_of_gradients(), "when": when}
    loop = Loop(alternating(optax.identity(), sam_optax.sam(), **roles), params)
    for (x, y), (w, _) in zip(
        zip(*batches(4), strict=True),
        reference(optax.identity(), sam_optax.sam(), params, steps=4, **roles),
        strict=True,
    ):
        loop.step(x, y)
        assert_same(loop.w, w)
    without = Loop(alternating(difference_of_gradients(), sam_optax.sam()), params)  # as the base
    without.call(x, y)
    with pytest.raises(TypeError, match="ascent_grads"):
        without.call(x, y)


ALL = {"descent": sam_optax.mix_gradients(0.9), "when": sam_optax.every(2), "skip_nonfinite": True}


@pytest.mark.parametrize(
    ("name", "options"),
    [("sam", {}), ("rsam", {}), ("fsam", ALL), ("rsam_scheduled", ALL)],
    ids=["sam", "rsam", "fsam-all", "rsam-all"],
)
@pytest.mark.slow
def test_jit_with_donation_and_scan_equal_the_eager_loop(name, options):
    """One trace, state of one signature, and no buffer of the params or twice in the state."""
    params = roomy_params()
    tx = alternating(BASES["sgd"], small(name), **options)
    xs, ys = batches(8)
    eager = Loop(tx, params)
    for x, y in zip(xs, ys, strict=True):
        eager.call(x, y)

    traces = itertools.count(1)

    def train_step(carry, batch):
        next(traces)
        params, state = carry
        updates, state = tx.update(jax.grad(mlp_loss)(params, *batch), state, params)
        return (optax.apply_updates(params, updates), state), None

    initial = jax.jit(tx.init)(params)
    assert signature(initial) == signature(tx.init(params)) == signature(eager.state)
    scanned, _ = jax.lax.scan(train_step, (params, initial), (xs, ys))
    donating = jax.jit(train_step, donate_argnums=0)
    traces = itertools.count(1)
    own = jax.tree.map(jnp.copy, params)
    carry = (own, tx.init(own))
    for batch in zip(xs, ys, strict=True):
        carry, _ = donating(carry, batch)
    assert next(traces) == 2
    for result in (carry, scanned):
        assert signature(result) == signature((eager.params, eager.state))
        assert_close(result, (eager.params, eager.state), rtol=1e-5, atol=1e-6)


def test_eager_state_is_donated_at_every_call():
    """Outside of jit, too, the state holds no buffer of the params, and none twice."""
    tx = alternating(BASES["sgd"], small("fsam"), skip_nonfinite=True)
    loop = Loop(tx, roomy_params())
    for x, y in zip(*batches(4), strict=True):
        pointers = [
            leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((loop.params, loop.state))
        ]
        assert len(set(pointers)) == len(pointers)
        loop.call(x, y * (jnp.nan if loop.calls == 1 else 1))


@pytest.mark.slow
def test_vmapped_runs_equal_single_ones():
    """Runs in different phases side by side."""
    when = sam_optax.every(2)
    runs = jax.tree.map(lambda w: jnp.stack([w, 0.9 * w, 1.1 * w]), roomy_params())
    rhos = jnp.array([0.02, 0.05, 0.1])

    def run(params, rho):
        tx = alternating(optax.sgd(0.02), sam_optax.sam(rho), when=when)

        def call(carry, batch):
            params, state = carry
            updates, state = tx.update(jax.grad(mlp_loss)(params, *batch), state, params)
            return (optax.apply_updates(params, updates), state), None

        (params, state), _ = jax.lax.scan(call, (params, tx.init(params)), batches(6))
        return eval_params(params, state)

    together, run = jax.vmap(run)(runs, rhos), jax.jit(run)
    for i, rho in enumerate(rhos):
        alone = run(jax.tree.map(lambda w: w[i], runs), rho)  # noqa: B023
        assert_close(jax.tree.map(lambda w: w[i], together), alone, rtol=1e-5)  # noqa: B023


def test_stock_flax_train_state():
    train_state = pytest.importorskip("flax.training.train_state")
    params = roomy_params()
    state = train_state.TrainState.create(
        apply_fn=None, params=params, tx=alternating(BASES["adamw"], small("rsam"))
    )
    batch_list = list(zip(*batches(3), strict=True))
    for x, y in [batch_list[0], *(b for b in batch_list for _ in range(2))]:
        state = state.apply_gradients(grads=GRAD(state.params, x, y))
    *_, (w, _) = reference(BASES["adamw"], small("rsam"), params, steps=3)
    assert_same(eval_params(state.params, state.opt_state), w)


def test_resumes_between_the_calls():
    serialization = pytest.importorskip("flax.serialization")
    tx = alternating(BASES["sgd"], small("rsam"), skip_nonfinite=True)
    loop = Loop(tx, roomy_params())
    restored = Loop(tx, roomy_params())
    for i, (x, y) in enumerate(zip(*batches(7), strict=True)):
        loop.call(x, y)
        if i == 3:
            saved = serialization.to_bytes((loop.params, loop.state))
            target = (restored.params, restored.state)
            restored.params, restored.state = serialization.from_bytes(target, saved)
        elif i > 3:
            restored.call(x, y)
    assert_same((restored.params, restored.state), (loop.params, loop.state))


def test_multi_steps_averages_both_gradients():
    """L_i = ½ a_i w², a = (1, 3), w = 1, ρ = .1, lr = .5: the sharp gradient is 2 · 1.1."""
    tx = optax.MultiSteps(alternating(optax.sgd(0.5), sam_optax.sam(0.1)), 2)
    w, state = jnp.array(1.0), tx.init(jnp.array(1.0))
    for a in (1.0, 3.0, 1.0, 3.0):
        updates, state = tx.update(a * w, state, w)
        w = optax.apply_updates(w, updates)
    for value in (w, eval_params(w, state)):
        np.testing.assert_allclose(value, 1 - 0.5 * 2.2, atol=1e-6)


def test_inside_chain_and_apply_if_finite():
    """A gradient that is not finite is dropped, in either phase, and the loop goes on.

    The wrapper compiles the step and the reference does not. Every product here is with a power of
    two, and so exact: whether the compiler fuses it with the sum behind it cannot be told.
    """
    base, method = optax.sgd(2**-6, momentum=0.5), sam_optax.sam(2**-5, p=np.inf)
    alternate = alternating(base, method)
    tx = optax.apply_if_finite(optax.chain(optax.clip(1e3), alternate), 3)
    params = roomy_params()
    state, update = tx.init(params), jax.jit(tx.update)
    batch_list = list(zip(*batches(3), strict=True))
    for i, (x, y) in enumerate(b for b in batch_list for _ in range(4)):
        grads = GRAD(params, x, y * (jnp.nan if i % 4 in (1, 2) else 1))
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    *_, (w, _) = reference(base, method, roomy_params(), steps=3)
    assert_same(eval_params(params, state), w)


def test_inject_hyperparams_edits_the_radius():
    make = functools.partial(
        lambda learning_rate, rho: alternating(optax.sgd(learning_rate), sam_optax.sam(rho))
    )
    tx = optax.inject_hyperparams(make)(learning_rate=0.125, rho=1.0)
    x, state = jnp.array(3.0), tx.init(jnp.array(3.0))
    update = jax.jit(tx.update)
    for rho, point in [(1.0, 4.0), (1.0, 2.0), (2.0, 4.0)]:
        state.hyperparams["rho"] = jnp.asarray(rho)
        updates, state = update(2 * x, state, x)
        x = optax.apply_updates(x, updates)
        assert float(x) == point


def test_schedules_count_training_steps():
    """ρ(t) = .1 (t + 1) and a rate that halves: radii .1, .2, .3 at rates .5, .25, .125."""
    rate = lambda t: 0.5 ** (t + 1.0)
    tx = alternating(optax.sgd(rate), sam_optax.sam(lambda t: 0.1 * (t + 1)))
    w, state = jnp.array(10.0), tx.init(jnp.array(10.0))
    for t in range(3):
        before = float(w)
        for offset in (0.1 * (t + 1), -rate(t)):
            updates, state = tx.update(jnp.array(1.0), state, w)
            w = optax.apply_updates(w, updates)
            np.testing.assert_allclose(float(w) - before, offset, rtol=1e-5)


@pytest.mark.slow
def test_leaves_of_every_kind():
    """Integers, holes, frozen and low-precision leaves, complex numbers, weak types."""
    params = {
        "w": jnp.array([3.0, -4.0]),
        "half": jnp.array([1.0, 2.0], jnp.bfloat16),
        "z": jnp.array([1 + 2j]),
        "weak": jnp.asarray(2.0),
        "frozen": jnp.array([1.0, 0.0]),
        "n": jnp.arange(3),
        "none": None,
    }
    assert params["weak"].weak_type
    frozen = {name: name == "frozen" for name in params}
    base = optax.chain(optax.sgd(0.1), optax.masked(optax.set_to_zero(), frozen))
    grads = {
        name: None if p is None else jnp.full_like(p, 50) if name == "n" else 0.5 * p
        for name, p in params.items()
    }
    tx, core = (f(base, sam_optax.sam(0.1)) for f in (alternating, sam_optax.sharpness_aware))
    live, state = params, tx.init(params)
    assert state.params["n"] is None
    for _ in range(2):
        updates, new_state = tx.update(grads, state, live)
        assert signature(updates) == signature(live)
        assert signature(new_state) == signature(state)
        live, state = optax.apply_updates(live, updates), new_state
    for name in ("n", "frozen"):
        assert_same(live[name], params[name])
    assert to_numpy(live["w"])[0] < 3
    updates, _ = core.update(grads, core.init(params), params, grad_fn=lambda _: grads)
    w = {**optax.apply_updates(params, updates), "n": params["n"]}
    assert_close(eval_params(live, state), w, rtol=0)


def test_float0_gradients_of_integer_leaves():
    params = {"w": jnp.array([3.0, -4.0]), "n": jnp.arange(3)}
    grad_fn = jax.grad(lambda p: jnp.sum(p["w"] ** 2 * p["n"][:2]), allow_int=True)
    tx = alternating(optax.masked(optax.sgd(0.1), {"w": True, "n": False}), sam_optax.sam(0.1))
    update = jax.jit(lambda state, params: tx.update(grad_fn(params), state, params))
    updates, state = update(tx.init(params), params)
    assert updates["n"].dtype == jax.dtypes.float0
    np.testing.assert_allclose(updates["w"], [0.0, -0.1], atol=1e-6)
    assert state.params["n"] is None


def test_extra_arguments_reach_both_parts():
    seen = []

    def spy(name):
        def update(updates, state, params=None, *, value, **extra):
            seen.append((name, value))
            return updates, state

        return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)

    tx = alternating(spy("base"), spy("perturbation"))
    w, state = jnp.ones(2), tx.init(jnp.ones(2))
    for value in ("first", "second"):
        _, state = tx.update(w, state, w, value=value, unknown=3)
    assert seen == [("perturbation", "first"), ("base", "second")]


def test_errors_say_what_to_pass():
    tx = alternating(optax.sgd(0.1), sam_optax.sam())
    state = tx.init(jnp.ones(2))
    with pytest.raises(ValueError, match=r"update\(grads, state, params\).*params=None"):
        tx.update(jnp.ones(2), state)
    with pytest.raises(ValueError, match=r"grads=None"):
        tx.update(None, state, jnp.ones(2))
    with pytest.raises(TypeError, match="base_tx"):
        alternating(0.1, sam_optax.sam())
    with pytest.raises(TypeError, match="perturbation"):
        alternating(optax.sgd(0.1), 0.05)
    with pytest.raises(TypeError, match="when"):
        alternating(optax.sgd(0.1), sam_optax.sam(), when=2)
    lost = optax.chain(sam_optax.rsam(key=jax.random.key(3)))
    with pytest.raises(ValueError, match="random start"):
        alternating(optax.sgd(0.1), lost).init(jnp.ones(2))
    with pytest.raises(ValueError, match=r"contains alternating.*got tuple"):
        eval_params(jnp.ones(2), optax.sgd(0.1).init(jnp.ones(2)))
    with pytest.raises(ValueError, match=r"two states of alternating.*pass the state of one"):
        eval_params(jnp.ones(2), (state, state))


@pytest.mark.slow
def test_state_is_what_it_documents():
    plain = alternating(optax.sgd(0.1), sam_optax.sam()).init(jnp.ones(2))
    assert isinstance(plain, AlternatingState)
    held = [leaf for leaf in jax.tree.leaves(plain) if leaf.size > 1]
    assert len(held) == 1  # one copy of the params and nothing else
    for field in AlternatingState._fields:
        assert f"{field}:" in AlternatingState.__doc__
