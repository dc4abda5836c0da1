"""Ascent along past gradients: the formula, one gradient a step, and every way of using it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.tree_utils as otu
import pytest
import references_family as ref
from family import BASE, LR, MOMENTUM, START, as_tree, gap, gradient, numpy_gradients, plain, run
from helpers import RuntimeCounted, assert_close, assert_same, norm, vector, x64
from jax.sharding import PartitionSpec as P

import sam_optax
from sam_optax.training import TrainState

partition = getattr(optax, "partition", optax.multi_transform)  # the older name

RHO = 0.3


def momentum(decay=0.9, sign=1.0):
    inner = sam_optax.sam(RHO)
    if sign < 0:
        inner = optax.chain(inner, optax.scale(-1.0))
    return sam_optax.momentum_start(inner, decay)


METHOD = momentum(0.6)
OF_BASE = momentum(None)


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
    points, states = run(sam_optax.sharpness_aware(BASE, momentum(MOMENTUM, -1.0)), 4)
    trace = vector(states[-1].base_state[0].trace)
    np.testing.assert_allclose(
        ref.unit(vector(states[-1].perturbation_state.ema)), ref.unit(trace), atol=1e-12
    )
    of_base, states = run(sam_optax.sharpness_aware(BASE, momentum(None, -1.0)), 4)
    assert gap(of_base, points) < 1e-13
    assert not jax.tree.leaves(states[-1].perturbation_state)  # it costs no memory


@pytest.mark.parametrize(
    ("in_loss", "expected"), [(0.5, (0.04253, 3.26201)), (0.0, (0.03720, 3.11963))]
)
def test_the_momentum_of_the_base_contains_its_weight_decay(in_loss, expected):
    """The decay is that of w + ε as part of the loss, and that of w as part of the base."""
    with x64():
        base = optax.chain(optax.add_decayed_weights(0.5 - in_loss), optax.sgd(0.1, momentum=0.9))
        method = sam_optax.momentum_start(optax.chain(sam_optax.sam(1.0), optax.scale(-1.0)))
        tx = sam_optax.sharpness_aware(base, method)
        grad_fn = jax.grad(lambda w: 0.5 * w[0] ** 2 + w[1] + 0.5 * in_loss * jnp.sum(w**2))
        w = jnp.array([0.1, 5.0])
        state = tx.init(w)
        for _ in range(3):
            updates, state = tx.update(None, state, w, grad_fn=grad_fn)
            w = optax.apply_updates(w, updates)
        assert w.dtype == jnp.float64
        np.testing.assert_allclose(w, expected, atol=6e-6)


def labelled():
    """SGD with momentum, with a leaf in its state that is no array."""

    def update(updates, state, params=None):
        updates, inner = BASE.update(updates, state[0], params)
        return updates, (inner, "label")

    return optax.GradientTransformation(lambda params: (BASE.init(params), "label"), update)


BASES = {
    "sgd": BASE,
    "adam": optax.adam(LR),
    "adamw": optax.inject_hyperparams(optax.adamw)(LR, weight_decay=0.1),
    "labelled": labelled(),
}


def along_the_buffer(base, when=lambda t: True, steps=4):
    """Params after some steps at w + ρ m/‖m‖, m the base's buffer, in a loop written by hand."""
    params = as_tree(START, jnp.float32)
    state = base.init(params)
    for t in range(steps):
        (m,) = otu.tree_get_all_with_path(state, "trace") or otu.tree_get_all_with_path(state, "mu")
        scale = RHO / norm(m[1]) if t and when(t) else 0.0
        point = jax.tree.map(lambda w, m: w + scale * m, params, m[1])  # noqa: B023
        updates, state = base.update(gradient(point, t), state, params)
        params = optax.apply_updates(params, updates)
    return params


def step_of(tx):
    def step(carry, t):
        params, state = carry
        updates, state = tx.update(None, state, params, grad_fn=lambda p: gradient(p, t))
        return (optax.apply_updates(params, updates), state), None

    return step


def in_sharpness_aware(base, around=lambda step: step, **options):
    tx = sam_optax.sharpness_aware(base, OF_BASE, **options)
    params, step = as_tree(START, jnp.float32), around(step_of(tx))
    carry = params, tx.init(params)
    for t in range(4):
        carry, _ = step(carry, t)
    return carry[0]


def in_scan(base):
    tx = sam_optax.sharpness_aware(base, OF_BASE)
    params = as_tree(START, jnp.float32)
    scan = jax.jit(lambda carry: jax.lax.scan(step_of(tx), carry, jnp.arange(4))[0])
    return scan((params, tx.init(params)))[0]


def in_alternating(base):
    tx = sam_optax.alternating(base, OF_BASE)
    params = as_tree(START, jnp.float32)
    state = tx.init(params)
    for t in (0, 0, 1, 2, 3):  # one call more, to the first start
        updates, state = tx.update(gradient(params, t), state, params)
        params = optax.apply_updates(params, updates)
    return sam_optax.eval_params(params, state)


def by_hand(base):
    params = as_tree(START, jnp.float32)
    state, base_state = OF_BASE.init(params), base.init(params)
    for t in range(4):
        start = OF_BASE.start_fn(params, state, base_state=base_state)
        grads = gradient(start, t)
        point, state = OF_BASE.perturb_fn(params, grads, state, base_state=base_state)
        assert_close(point, start, 1e-6)
        updates, base_state = base.update(grads, base_state, params)
        params = optax.apply_updates(params, updates)
    return params


ENTRANCES = {
    "eager": in_sharpness_aware,
    "jit": lambda base: in_sharpness_aware(base, jax.jit),
    "scan": in_scan,
    "alternating": in_alternating,
    "by_hand": by_hand,
}


@pytest.mark.parametrize(
    ("name", "entrance"),
    [(name, entrance) for name in BASES for entrance in ENTRANCES if name != "labelled"]
    + [("labelled", "eager"), ("labelled", "alternating")],  # nothing else takes its state
)
@pytest.mark.fast("sgd-jit", "adam-*", "labelled-*")
def test_the_base_optimizers_buffer_by_every_entrance(name, entrance):
    found = ENTRANCES[entrance](BASES[name])
    assert_close(found, along_the_buffer(BASES[name]), 1e-5)
    without = along_the_buffer(BASES[name], when=lambda t: False)
    assert np.abs(vector(found) - vector(without)).max() > 1e-3


def test_the_base_optimizers_buffer_contains_the_steps_that_do_not_perturb():
    found = in_sharpness_aware(BASE, jax.jit, when=sam_optax.every(2))
    assert_close(found, along_the_buffer(BASE, lambda t: t % 2 == 0), 1e-5)


class Named(NamedTuple):
    """Params with the names of the buffers."""

    mu: jax.Array
    trace: jax.Array


@pytest.mark.parametrize("base", ["sgd", "adam"])
@pytest.mark.parametrize("make", [Named, lambda mu, trace: {"mu": mu, "trace": {"mu": trace}}])
def test_params_with_the_names_of_a_buffer(make, base):
    params = make(jnp.array([3.0, 4.0]), jnp.array([0.0]))
    state = jax.tree.map(lambda x: x + 2, BASES[base].init(params))  # every buffer is 2
    start = OF_BASE.start_fn(params, OF_BASE.init(params), base_state=state)
    np.testing.assert_allclose(vector(start) - vector(params), RHO / np.sqrt(3), rtol=1e-5)


def test_of_a_part_of_the_params():
    params, only = as_tree(START, jnp.float32), {"a": False, "b": True}
    method = sam_optax.perturb_only(OF_BASE, only)
    state = jax.tree.map(lambda x: x + 2, optax.adam(LR).init(params))
    start = method.start_fn(params, method.init(params), base_state=state)
    assert_same(start["a"], params["a"])
    np.testing.assert_allclose(start["b"] - params["b"], RHO / np.sqrt(3), rtol=1e-5)


@pytest.mark.parametrize(
    ("base", "found"),
    [
        (optax.sgd(0.1), "none"),
        (
            optax.chain(optax.trace(0.9), optax.adam(0.1)),
            r"\[0\]TraceState.trace, \[1\]\[0\]ScaleByAdamState.mu",
        ),
    ],
)
@pytest.mark.parametrize("params", [jnp.ones(2), {"mu": jnp.ones(2)}])
def test_no_buffer_and_several(base, found, params):
    for combinator in (sam_optax.sharpness_aware, sam_optax.alternating):
        tx = combinator(base, OF_BASE)
        with pytest.raises(ValueError, match=rf"exactly one, found: {found}\. .*decay=0\.9"):
            tx.update(params, tx.init(params), params, grad_fn=lambda p: p)


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


def on_two_devices(kind, function, data):
    """The results of both devices."""
    if kind == "pmap":
        return jax.pmap(function, axis_name="batch", devices=jax.devices()[:2])(data)
    if not hasattr(jax, "shard_map"):
        pytest.skip("jax.shard_map is newer than this jax")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("batch",))
    one = lambda x: jax.tree.map(lambda leaf: leaf[None], function(x[0]))
    return jax.jit(jax.shard_map(one, mesh=mesh, in_specs=P("batch"), out_specs=P("batch")))(data)


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("kind", ["pmap", "shard_map"])
@pytest.mark.parametrize("method", [METHOD, OF_BASE], ids=["own", "base"])
@pytest.mark.fast("base-shard_map-False")
def test_devices_keep_one_state(sync, kind, method):
    tx = sam_optax.sharpness_aware(
        optax.sgd(0.1, momentum=0.9), method, axis_name="batch", sync_perturbation=sync
    )
    w = jnp.array([1.0, -2.0])

    def steps(centre):
        params, state = w, tx.init(w)
        for _ in range(3):
            updates, state = tx.update(None, state, params, grad_fn=lambda p: p**3 - centre)
            params = optax.apply_updates(params, updates)
        return params, state

    centres = jnp.array([[1.0, 0.0], [3.0, -2.0]])
    result = on_two_devices(kind, steps, centres)
    for leaf in jax.tree.leaves(result):
        assert_same(leaf[0], leaf[1])
    # The gradient is linear in the centre: the devices' mean is the whole batch.
    single = sam_optax.sharpness_aware(optax.sgd(0.1, momentum=0.9), method)
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
    assert float(state.inner_state.ema[0]) == pytest.approx(6.0)
    assert int(state.step) == 3


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
        (
            lambda: OF_BASE.start_fn(jnp.ones(2), OF_BASE.init(jnp.ones(2))),
            ValueError,
            ["base_state=opt_state to start_fn and perturb_fn", "decay=0.9"],
        ),
    ],
)
def test_errors(call, error, words):
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


def test_leaves_without_momentum_are_not_perturbed():
    """As of a base optimizer that trains some leaves only."""
    base = partition(
        {"trained": optax.sgd(0.1, momentum=0.9), "frozen": optax.set_to_zero()},
        {"a": "trained", "b": "frozen"},
    )
    params = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([1.0])}
    points = []

    def grad_fn(p):
        points.append(p)
        return p

    tx = sam_optax.sharpness_aware(base, sam_optax.momentum_start(sam_optax.sam(1.0)))
    state = tx.init(params)
    for _ in range(2):
        updates, state = tx.update(None, state, params, grad_fn=grad_fn)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(points[1]["a"] - np.array([2.7, 3.6]), [0.6, 0.8], rtol=1e-5)
    np.testing.assert_array_equal(points[1]["b"], 1.0)


@pytest.mark.parametrize("name", ["momentum_start", "low_pass"])
def test_by_hand_no_gradient_is_needed(name):
    w = jnp.ones(2)
    if name == "low_pass":
        method, extra = sam_optax.low_pass(0.1, key=0), {}
    else:
        method = sam_optax.momentum_start(sam_optax.sam(1.0))
        extra = {"base_state": (optax.TraceState(jnp.array([3.0, 4.0])),)}
    state = method.init(w)
    start = method.start_fn(w, state, **extra)
    assert not np.array_equal(start, w)
    point, _ = method.perturb_fn(w, None, state, **extra)
    np.testing.assert_allclose(point, start, rtol=1e-6)
    averaging = sam_optax.momentum_start(sam_optax.sam(1.0), 0.9)
    state = averaging.init(w)
    with pytest.raises(ValueError, match="with decay averages the gradients: pass grads"):
        averaging.perturb_fn(w, None, state)


def test_a_momentum_of_updates_is_refused():
    """That of ``optax.rmsprop`` holds −η g/√v: an ascent along it would descend."""
    x = jnp.array([3.0])
    step = lambda base: sam_optax.sharpness_aware(
        base, sam_optax.momentum_start(sam_optax.sam(1.0))
    )
    for base in (
        optax.rmsprop(0.1, momentum=0.9),
        optax.chain(optax.clip(1.0), optax.rmsprop(0.1, momentum=0.9)),
        optax.lars(0.1),  # no statistics, but −η g in the trace, as in the next
        optax.chain(optax.scale(-0.1), optax.trace(0.9)),
        optax.chain(optax.scale(-0.1), optax.scale_by_adam()),
    ):
        tx = step(base)
        with pytest.raises(ValueError, match=r"needs a momentum of gradients.*(trace|mu).*rmsprop"):
            tx.update(None, tx.init(x), x, grad_fn=lambda x: x)
    for base in (
        optax.chain(optax.clip_by_global_norm(1.0), optax.zero_nans(), optax.sgd(0.1, 0.9)),
        optax.inject_hyperparams(optax.sgd)(learning_rate=0.1, momentum=0.9),
        partition({"a": optax.adamw(0.1)}, "a"),
    ):
        tx = step(base)
        tx.update(None, tx.init(x), x, grad_fn=lambda x: x)
