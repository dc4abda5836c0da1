"""Steps of `sharpness_aware` whose right values are known by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from helpers import Counted, assert_close, assert_same, batches, init_mlp, mlp_loss, norm
from methods import FOUR, make

import sam_optax

KEY = jax.random.key(0)


SGD, ADAMW = optax.sgd(0.1, momentum=0.9), optax.adamw(1e-2)


def parabola(x):
    return 0.5 * jnp.sum(x**2)


def train(tx, params, steps, *, seed=1, state=None, sharp=True):
    """Params and state after each step on the small MLP, in one compiled step."""
    x, y = batches(steps, seed)

    @jax.jit
    def step(params, state, x, y):
        grad_fn = lambda p: jax.grad(mlp_loss)(p, x, y)
        extra = {"grad_fn": grad_fn} if sharp else {}
        updates, state = tx.update(grad_fn(params), state, params, **extra)
        return optax.apply_updates(params, updates), state

    state = tx.init(params) if state is None else state
    history = []
    for i in range(steps):
        params, state = step(params, state, x[i], y[i])
        history.append((params, state))
    return history


# Radius 0 is the base optimizer, exactly.


@pytest.mark.parametrize("name", FOUR)
@pytest.mark.fast("sam", "rsam")
def test_radius_0_by_hand(name):
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), make(name, 0.0))
    base = optax.sgd(0.1)
    x = y = jnp.array(1.0)
    state, base_state = tx.init(x), base.init(x)
    for expected in (0.9, 0.81, 0.729, 0.6561):
        updates, state = tx.update(None, state, x, grad_fn=jax.grad(parabola))
        x = optax.apply_updates(x, updates)
        base_updates, base_state = base.update(jax.grad(parabola)(y), base_state)
        y = optax.apply_updates(y, base_updates)
        assert float(x) == pytest.approx(expected, rel=1e-6)
        assert_same(x, y)


@pytest.mark.parametrize(("name", "base_name"), [(n, "sgd") for n in FOUR] + [("sam", "adamw")])
@pytest.mark.fast("sam-sgd")
def test_radius_0_is_the_base_optimizer(name, base_name):
    params, base = init_mlp(), {"sgd": SGD, "adamw": ADAMW}[base_name]
    sharp = train(sam_optax.sharpness_aware(base, make(name, 0.0)), params, 4)
    plain = train(base, params, 4, sharp=False)
    for (p, state), (q, base_state) in zip(sharp, plain, strict=True):
        assert_same(p, q)
        assert_same(state.base_state, base_state)


# Schedules and edits of hyperparameters.


@pytest.mark.parametrize("name", ["sam", "fsam", "rsam"])
def test_schedule_of_the_radius(name):
    learning_rates = []

    def learning_rate(count):
        learning_rates.append(int(count))
        return 0.1

    tx = sam_optax.sharpness_aware(optax.sgd(learning_rate), make(name, lambda t: 0.1 * (t + 1)))
    params = jnp.array([1.0, 2.0])
    state = tx.init(params)
    learning_rates.clear()
    for t in range(4):
        points = []

        def grad_fn(p, points=points, t=t):
            points.append(p)
            return p + t  # not constant, so that F-SAM has a direction

        updates, state = tx.update(None, state, params, grad_fn=grad_fn)
        assert norm(points[-1] - params) == pytest.approx(0.1 * (t + 1), rel=1e-5)
        params = optax.apply_updates(params, updates)
    assert learning_rates == [0, 1, 2, 3]
    assert int(state.step) == 4


@pytest.mark.parametrize("placement", ["around", "perturbation"])
def test_edits_of_the_radius_without_a_retrace(placement):
    if placement == "around":
        tx = optax.inject_hyperparams(
            lambda rho: sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.sam(rho))
        )(rho=0.1)
    else:
        inject = optax.inject_hyperparams(sam_optax.sam, static_args="p")
        tx = sam_optax.sharpness_aware(optax.sgd(0.1), inject(rho=0.1))

    def hyperparams(state):
        return (state if placement == "around" else state.perturbation_state).hyperparams

    grad_fn = lambda x: 2 * x
    step = Counted(lambda x, s: tx.update(None, s, x, grad_fn=grad_fn))
    jitted = jax.jit(step)
    x = jnp.array(3.0)
    state = tx.init(x)
    for rho in (0.1, 0.5, 0.0):
        hyperparams(state)["rho"] = jnp.asarray(rho)
        updates, state = jitted(x, state)
        assert float(updates) == pytest.approx(-0.2 * (3 + rho), rel=1e-6)
    # Weak types aside: optax's own first state may differ in those from the ones that follow.
    assert step.calls <= 2


# Decoupled weight decay uses w.


@pytest.mark.parametrize("name", FOUR)
@pytest.mark.parametrize("rho", [0.0, 0.5, 5.0])
@pytest.mark.slow
def test_decoupled_weight_decay(name, rho):
    tx = sam_optax.sharpness_aware(optax.adamw(1.0, weight_decay=0.5), make(name, rho))
    w = jnp.array([3.0, 4.0])
    updates, _ = tx.update(None, tx.init(w), w, grad_fn=lambda w: jnp.array([1.0, 2.0]))
    np.testing.assert_allclose(updates, [-2.5, -3.0], rtol=1e-5)


# Clipping bounds the update inside base_tx only.


@pytest.mark.parametrize("name", FOUR)
def test_clipping_bounds_the_update_alone(name):
    hessian, w, clip = jnp.array([10.0, 1.0]), jnp.array([1.0, 1.0]), 1.0
    grad_fn = lambda w: hessian * w
    inside = sam_optax.sharpness_aware(
        optax.chain(optax.clip_by_global_norm(clip), optax.sgd(1.0)), make(name, 0.5)
    )
    outside = optax.chain(
        optax.clip_by_global_norm(clip), sam_optax.sharpness_aware(optax.sgd(1.0), make(name, 0.5))
    )
    norms = [
        norm(tx.update(grad_fn(w), tx.init(w), w, grad_fn=grad_fn)[0]) for tx in (inside, outside)
    ]
    assert norms[0] <= clip * (1 + 1e-6)
    assert norms[1] > 10


# The first steps are the base optimizer's.


@pytest.mark.parametrize(("name", "n"), [("sam", 0), *((name, 2) for name in FOUR)])
@pytest.mark.slow
def test_start_at_step_n(name, n):
    base, params = SGD, init_mlp()
    delayed = train(
        sam_optax.sharpness_aware(base, make(name, 0.5), when=sam_optax.after(n)), params, 4
    )
    plain = train(base, params, 4, sharp=False)
    for (p, state), (q, base_state) in zip(delayed[:n], plain[:n], strict=True):
        assert_same(p, q)
        assert_same(state.base_state, base_state)
    assert norm(jax.tree.map(jnp.subtract, delayed[n][0], plain[n][0])) > 1e-4
    if n and name != "rsam":
        # From there on it is the method's own run, started at the params of step n.
        x, y = batches(4)
        grads = jax.grad(mlp_loss)(plain[n - 1][0], x[n], y[n])
        method = make(name, 0.5)
        point, _ = method.perturb_fn(plain[n - 1][0], grads, method.init(params))
        sharp = jax.grad(mlp_loss)(point, x[n], y[n])
        updates, _ = base.update(sharp, plain[n - 1][1], plain[n - 1][0])
        assert_close(delayed[n][0], optax.apply_updates(plain[n - 1][0], updates), 1e-5)


# Extra arguments.


@pytest.mark.parametrize("jit", [False, True])
def test_value_reaches_reduce_on_plateau(jit):
    tx = sam_optax.sharpness_aware(
        optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(factor=0.5, patience=2)),
        sam_optax.sam(0.05),
    )
    w = jnp.ones(2)

    def step(w, state, value):
        return tx.update(None, state, w, grad_fn=lambda w: w, value=value, unknown=1.0)

    step = jax.jit(step) if jit else step
    state = tx.init(w)
    for _ in range(4):
        _, state = step(w, state, jnp.asarray(1.0))
    assert float(state.base_state[1].scale) == 0.5


# Low-precision params.


@pytest.mark.parametrize("perturb_dtype", [None, jnp.float32])
@pytest.mark.parametrize("name", FOUR)
@pytest.mark.fast("sam-*", "rsam-None")
def test_params_are_restored_bit_for_bit(name, perturb_dtype):
    w = {"w": jnp.array([1, 100, 0.001], jnp.bfloat16)}
    tx = sam_optax.sharpness_aware(optax.sgd(0.0), make(name, 0.05), perturb_dtype=perturb_dtype)
    state = tx.init(w)
    before = w
    step = jax.jit(lambda w, s: tx.update(None, s, w, grad_fn=lambda p: p))
    for _ in range(10):
        updates, state = step(w, state)
        assert updates["w"].dtype == jnp.bfloat16
        w = optax.apply_updates(w, updates)
    assert_same(w, before)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_float32_point_keeps_the_displacement(dtype):
    """In bfloat16 the middle element's ε is rounded away: its spacing at 100 is .5."""
    w, g = {"w": jnp.array([1, 100, 0.001], dtype)}, {"w": jnp.ones(3, dtype)}
    exact = np.float64(np.asarray(w["w"], np.float32)) + 0.05 / np.sqrt(3)
    points = {}
    for perturb_dtype in (None, jnp.float32):
        tx = sam_optax.sharpness_aware(
            optax.sgd(1.0), sam_optax.sam(0.05), perturb_dtype=perturb_dtype
        )

        def grad_fn(p, perturb_dtype=perturb_dtype):
            points[perturb_dtype] = p["w"]
            return p

        updates, _ = tx.update(g, tx.init(w), w, grad_fn=grad_fn)
        assert updates["w"].dtype == dtype
    assert points[None].dtype == dtype
    assert points[jnp.float32].dtype == jnp.float32
    # ε itself has the precision of the gradient's dtype, 2^−8 or better.
    np.testing.assert_allclose(points[jnp.float32], exact, atol=0.05 / np.sqrt(3) * 2.0**-8)
    lost = np.abs(np.float64(np.asarray(points[None], np.float32)) - exact)
    assert lost[1] > (0.02 if dtype == jnp.bfloat16 else 0.005)
