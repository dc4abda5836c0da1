"""Ascent along past gradients: the formula, one gradient a step, and every way of using it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import references_family as ref
from family import BASE, LR, MOMENTUM, START, as_tree, gap, gradient, numpy_gradients, plain, run
from helpers import RuntimeCounted, assert_close, assert_same, norm, vector

import sam_optax
from sam_optax.training import TrainState

RHO = 0.3


def momentum(decay=0.9, sign=1.0):
    inner = sam_optax.sam(RHO)
    if sign < 0:
        inner = optax.chain(inner, optax.scale(-1.0))
    return sam_optax.momentum_start(inner, decay)


METHOD = momentum(0.6)


def reference(gradient_of):
    return ref.train(START, numpy_gradients(), gradient_of, LR, MOMENTUM)


@pytest.mark.parametrize(("decay", "sign"), [(0.6, 1.0), (0.0, 1.0), (0.9, -1.0)])
@pytest.mark.slow
def test_trajectories(decay, sign):
    """With decay 0 along the last gradient; with the sign reversed Momentum-SAM."""
    points, _ = run(sam_optax.sharpness_aware(BASE, momentum(decay, sign)))
    assert gap(points, reference(ref.momentum_ascent(RHO, decay, sign))) < 1e-12
    for wrong in ((0.3, sign), (decay, -sign)):
        assert gap(points, reference(ref.momentum_ascent(RHO, *wrong))) > 1e-3
    assert gap(points[:1], plain(steps=1)) < 1e-15  # the first step is the base optimizer's


def test_momentum_sam_ascends_along_sgds_own_momentum():
    """ε = −ρ v/‖v‖ with v the trace of SGD with the same decay, as the paper writes it."""
    _, states = run(sam_optax.sharpness_aware(BASE, momentum(MOMENTUM, -1.0)), 4)
    trace = vector(states[-1].base_state[0].trace)
    np.testing.assert_allclose(
        ref.unit(vector(states[-1].perturbation_state.ema)), ref.unit(trace), atol=1e-12
    )


def test_first_step_is_the_base_optimizers_to_the_bit():
    tx = sam_optax.sharpness_aware(BASE, METHOD)
    params = as_tree(START, jnp.float32)
    grad_fn = lambda p: gradient(p, 0)
    updates, state = tx.update(None, tx.init(params), params, grad_fn=grad_fn)
    expected, base_state = BASE.update(grad_fn(params), BASE.init(params))
    assert_same(updates, expected)
    assert_same(state.base_state, base_state)


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("when", [None, sam_optax.every(2)])
@pytest.mark.slow
def test_one_gradient_a_step(jit, when):
    grad_fn = RuntimeCounted(lambda p: 2 * p)
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), METHOD, when=when)
    step = lambda s, p: tx.update(None, s, p, grad_fn=grad_fn)
    step, params = jax.jit(step) if jit else step, jnp.array([3.0, 4.0])
    state = tx.init(params)
    for t in range(4):
        updates, state = step(state, params)
        params = optax.apply_updates(params, updates)
        jax.effects_barrier()
        assert grad_fn.evaluations == t + 1


def test_other_steps_do_not_enter_the_average():
    tx = sam_optax.sharpness_aware(BASE, METHOD, when=sam_optax.every(2))
    points, states = run(tx, 4)
    assert_same(states[1].perturbation_state, states[0].perturbation_state)
    seen = []

    def gradient_of(t, w, grad):
        if t % 2:
            return grad(w)
        m = 0.6 * seen[-1] if seen else None
        g = grad(w) if m is None else grad(w + RHO * ref.unit(m))
        seen.append(g if m is None else m + 0.4 * g)
        return g

    assert gap(points[:2], reference(gradient_of)[:2]) < 1e-13
    assert gap(points, plain(steps=4)) > 1e-3


def test_given_gradients_are_not_used():
    tx = sam_optax.sharpness_aware(BASE, METHOD)
    params = as_tree(START, jnp.float32)
    state = tx.init(params)._replace(perturbation_state=METHOD.init(params)._replace(ema=params))
    nan = jax.tree.map(lambda x: x * jnp.nan, params)
    steps = [tx.update(g, state, params, grad_fn=lambda p: p) for g in (None, nan)]
    assert_same(*steps)


def test_apply_loss_returns_the_loss_at_the_perturbed_params():
    tx = sam_optax.sharpness_aware(optax.sgd(0.0), METHOD)
    losses = []
    state = TrainState.create(apply_fn=None, params=jnp.array([3.0, 4.0]), tx=tx)
    step = jax.jit(lambda s: s.apply_loss(lambda p: 0.5 * jnp.sum(p**2)))
    for _ in range(2):
        state, loss = step(state)
        losses.append(float(loss))
    assert losses == pytest.approx([12.5, 0.5 * (5 + RHO) ** 2])


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.slow
def test_devices_keep_one_state(sync):
    tx = sam_optax.sharpness_aware(
        optax.sgd(0.1, momentum=0.9), METHOD, axis_name="batch", sync_perturbation=sync
    )
    w = jnp.array([1.0, -2.0])

    def steps(centre):
        params, state = w, tx.init(w)
        for _ in range(3):
            updates, state = tx.update(None, state, params, grad_fn=lambda p: p**3 - centre)
            params = optax.apply_updates(params, updates)
        return params, state

    centres = jnp.array([[1.0, 0.0], [3.0, -2.0]])
    result = jax.pmap(steps, axis_name="batch", devices=jax.devices()[:2])(centres)
    for leaf in jax.tree.leaves(result):
        assert_same(leaf[0], leaf[1])
    # The gradient is linear in the centre: the devices' mean is the whole batch.
    single = sam_optax.sharpness_aware(optax.sgd(0.1, momentum=0.9), METHOD)
    params, state = w, single.init(w)
    for _ in range(3):
        grad_fn = lambda p: p**3 - centres.mean(0)
        updates, state = single.update(None, state, params, grad_fn=grad_fn)
        params = optax.apply_updates(params, updates)
    assert_close(result[0][0], params, 1e-5)


@pytest.mark.slow
def test_groups_share_one_displacement():
    a = jnp.array([1.0, 3.0])
    tx = sam_optax.sharpness_aware(optax.sgd(1.0), momentum(0.0), groups=2)
    state, w = tx.init(jnp.array(2.0)), jnp.array(2.0)
    for expected in (2 * 2.0, 2 * (2.0 + RHO)):  # the mean of a is 2
        updates, state = tx.update(None, state, w, grad_fn=lambda p, i: a[i] * p)
        assert float(updates) == pytest.approx(-expected)
    assert float(state.perturbation_state.ema) == pytest.approx(2 * (2 + RHO))


def test_float32_point_for_bfloat16_params():
    """ε = .3/√2 is lost at 100 in bfloat16, whose numbers there are .5 apart."""
    w, points = jnp.array([100.0, 100.0], jnp.bfloat16), []

    def grad_fn(p):
        points.append(p)
        return jnp.ones_like(p)

    tx = sam_optax.sharpness_aware(optax.sgd(0.1), METHOD, perturb_dtype=jnp.float32)
    state = tx.init(w)
    for _ in range(2):
        updates, state = tx.update(None, state, w, grad_fn=grad_fn)
    assert updates.dtype == state.perturbation_state.ema.dtype == jnp.bfloat16
    assert points[1].dtype == jnp.float32
    np.testing.assert_allclose(points[1], 100 + RHO / np.sqrt(2), rtol=1e-5)


def test_zero_gradients_and_other_leaves():
    params = {"w": jnp.array([1.0, 2.0]), "n": None, "i": jnp.arange(2)}
    tx = sam_optax.sharpness_aware(optax.identity(), METHOD)
    state = tx.init(params)
    zero = {"w": jnp.zeros(2), "n": None, "i": np.zeros(2, jax.dtypes.float0)}
    for _ in range(3):
        updates, state = tx.update(None, state, params, grad_fn=lambda p: zero)
        assert norm(updates["w"]) == 0
    assert state.perturbation_state.ema["i"] is None


@pytest.mark.slow
def test_around_other_perturbations():
    """Each maps the average to ε, with its own state and the params."""
    params, g = as_tree(START, jnp.float32), as_tree(START[::-1], jnp.float32)
    for inner in (sam_optax.asam(RHO), sam_optax.fisher_sam(RHO), sam_optax.fsam(RHO)):
        method = sam_optax.momentum_start(inner, 0.0)
        _, state = method.update(g, method.init(params), params)
        eps, _ = inner.update(g, state.inner_state, params)
        start = method.start_fn(params, state)
        assert_close(start, jax.tree.map(jnp.add, params, eps), 1e-6)
        assert_close(method.perturb_fn(params, params, state)[0], start, 1e-6)


def test_schedule_of_the_decay():
    method = sam_optax.momentum_start(sam_optax.sam(RHO), lambda t: t / (t + 1))  # the mean
    state = method.init(jnp.zeros(1))
    for g in (3.0, 5.0, 10.0):
        _, state = method.update(jnp.array([g]), state, jnp.zeros(1))
    assert float(state.ema[0]) == pytest.approx(6.0)
    assert int(state.schedule.step) == 3


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: momentum(1.0), ValueError, ["decay", "1.0", "[0, 1)"]),
        (lambda: momentum(-0.1), ValueError, ["decay", "-0.1"]),
        (lambda: sam_optax.momentum_start(0.1), TypeError, ["GradientTransformation", "0.1"]),
        (lambda: sam_optax.momentum_start(METHOD), ValueError, ["already has a start"]),
        (
            lambda: sam_optax.momentum_start(sam_optax.rsam(key=jax.random.key(0))),
            ValueError,
            ["already has a start"],
        ),
        (
            lambda: sam_optax.sharpness_aware(BASE, METHOD, ascent_steps=2),
            ValueError,
            ["ascent_steps must be 1", "2"],
        ),
        (
            lambda: sam_optax.sharpness_aware(BASE, optax.chain(METHOD)).init(jnp.ones(2)),
            ValueError,
            ["optax.chain", "momentum_start"],
        ),
    ],
)
def test_errors(call, error, words):
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value)
