"""Data-parallel devices: averaged gradients, per-device and synchronized perturbations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from methods import FOUR, make

import sam_optax

if not hasattr(jax, "shard_map"):
    pytest.skip("jax.shard_map is newer than this jax", allow_module_level=True)

KEY = jax.random.key(3)
RUNNERS = ("pmap", "shard_map", "shard_map without check_vma")


def mesh(*shape, names=("batch",)):
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return jax.sharding.Mesh(devices, names)


def on_devices(runner, step, n=2):
    """``step(params, state, data)`` on n devices, params and state replicated, data split."""
    if runner == "pmap":
        mapped = jax.pmap(step, axis_name="batch", devices=jax.devices()[:n])

        def run(params, state, data):
            replicate = lambda t: jax.tree.map(lambda x: jnp.stack([x] * n), t)
            split = jax.tree.map(lambda x: x.reshape(n, -1, *x.shape[1:]), data)
            return mapped(replicate(params), replicate(state), split)

        return run
    return jax.jit(
        jax.shard_map(
            step,
            mesh=mesh(n),
            in_specs=(P(), P(), P("batch")),
            out_specs=P("batch"),
            check_vma=runner == "shard_map",
        )
    )


def quadratic(params, centres):
    return jnp.mean(jax.vmap(lambda c: 0.5 * jnp.sum((params["w"] - c) ** 2))(centres))


def steps(tx, loss, n=1):
    """n steps; every leaf of the result gets a leading axis, so that devices can be told apart."""

    def run(params, state, data):
        for _ in range(n):
            grad_fn = jax.grad(lambda p: loss(p, data))
            updates, state = tx.update(None, state, params, grad_fn=grad_fn)
            params = optax.apply_updates(params, updates)
        return params, state

    return lambda *args: jax.tree.map(lambda x: x[None], run(*args))


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(("sync", "gradient"), [(True, 1.1), (False, 1.0)])
def test_two_devices_by_hand(runner, sync, gradient):
    tx = sam_optax.sharpness_aware(
        optax.sgd(1.0), sam_optax.sam(0.1), axis_name="batch", sync_perturbation=sync
    )
    params = {"w": jnp.zeros(())}
    run = on_devices(runner, steps(tx, quadratic))
    new, _ = run(params, tx.init(params), jnp.array([1.0, -3.0]))
    np.testing.assert_allclose(new["w"].ravel(), -gradient, rtol=1e-6)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("name", [*FOUR, "random_fsam"])
@pytest.mark.slow
@pytest.mark.sample("*-shard_map", "random_fsam-*")
def test_state_is_the_same_on_all_devices(name, sync, runner):
    tx = sam_optax.sharpness_aware(
        optax.adam(0.1), make(name, 0.1), axis_name="batch", sync_perturbation=sync
    )
    params = {"w": jnp.array([0.3, -0.2, 0.9])}
    data = jax.random.normal(KEY, (8, 3))
    result = on_devices(runner, steps(tx, quadratic, n=3))(params, tx.init(params), data)
    for leaf in jax.tree.leaves(result):
        leaf = np.asarray(leaf).reshape(2, -1)
        np.testing.assert_array_equal(leaf[0], leaf[1])
    assert np.all(np.isfinite(jax.tree.leaves(result[0])[0]))


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("name", ["sam", "asam", "fsam"])
@pytest.mark.fast("fsam-True")
def test_identical_data_on_two_devices_equals_one_device(name, sync):
    params, data = {"w": jnp.array([0.3, -0.2, 0.9])}, jax.random.normal(KEY, (4, 3))
    single = sam_optax.sharpness_aware(optax.sgd(0.1), make(name, 0.1))
    expected, _ = steps(single, quadratic, n=3)(params, single.init(params), data)
    tx = sam_optax.sharpness_aware(
        optax.sgd(0.1), make(name, 0.1), axis_name="batch", sync_perturbation=sync
    )
    run = on_devices("shard_map", steps(tx, quadratic, n=3))
    new, _ = run(params, tx.init(params), jnp.concatenate([data, data]))
    np.testing.assert_allclose(new["w"][0], expected["w"][0], rtol=1e-5)


@pytest.mark.slow
def test_synchronized_equals_one_device_with_the_whole_batch():
    """Per-device perturbations do not: the control."""
    params, data = {"w": jnp.array([0.3, -0.2, 0.9])}, jax.random.normal(KEY, (8, 3))
    loss = lambda p, x: jnp.mean(jnp.sum(jnp.tanh(x * p["w"]) ** 2, -1))
    single = sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.sam(0.5))
    expected, _ = steps(single, loss, n=3)(params, single.init(params), data)
    result = {}
    for sync in (True, False):
        tx = sam_optax.sharpness_aware(
            optax.sgd(0.1), sam_optax.sam(0.5), axis_name="batch", sync_perturbation=sync
        )
        run = on_devices("shard_map", steps(tx, loss, n=3))
        result[sync] = run(params, tx.init(params), data)[0]["w"][0]
    np.testing.assert_allclose(result[True], expected["w"][0], rtol=1e-5)
    assert np.abs(result[False] - expected["w"][0]).max() > 1e-4


def test_fsam_average_sees_the_mean_gradient():
    tx = sam_optax.sharpness_aware(optax.sgd(1.0), sam_optax.fsam(0.1), axis_name="batch")
    params = {"w": jnp.zeros(())}
    run = on_devices("shard_map", steps(tx, quadratic))
    _, state = run(params, tx.init(params), jnp.array([1.0, -3.0]))
    np.testing.assert_allclose(state.perturbation_state[0].ema["w"].ravel(), [1.0, 1.0])


@pytest.mark.slow
def test_rsam_draws_differ_between_devices_and_come_from_one_key():
    method = make("rsam", 0.1, gamma=0.3)
    params = {"w": jnp.ones((4, 4))}
    state = method.init(params)
    draws = [method.start_fn(params, state, draw_index=i)["w"] for i in (0, 1, 1)]
    assert not np.array_equal(draws[0], draws[1])
    np.testing.assert_array_equal(draws[1], draws[2])
    both = jax.vmap(lambda i: method.start_fn(params, state, draw_index=i)["w"])(jnp.arange(2000))
    noise = np.asarray(both - 1, np.float64)
    np.testing.assert_allclose(noise.var(), 0.3**2, rtol=0.02)  # a kernel of 4 has norm 2
    correlation = np.corrcoef(noise[:-1].ravel(), noise[1:].ravel())[0, 1]
    assert abs(correlation) < 4 / np.sqrt(noise.size)


def test_nested_axes():
    tx = sam_optax.sharpness_aware(
        optax.sgd(1.0), sam_optax.sam(0.1), axis_name=("host", "batch"), sync_perturbation=True
    )
    params = {"w": jnp.zeros(())}
    step = jax.shard_map(
        steps(tx, quadratic),
        mesh=mesh(2, 2, names=("host", "batch")),
        in_specs=(P(), P(), P(("host", "batch"))),
        out_specs=P(("host", "batch")),
    )
    new, _ = jax.jit(step)(params, tx.init(params), jnp.array([1.0, -3.0, 1.0, -3.0]))
    np.testing.assert_allclose(new["w"].ravel(), -1.1, rtol=1e-6)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    ("method", "sync", "groups"),
    [("random_fsam", True, 2), ("random_fsam", False, 2), ("fsam", True, None)],
)
@pytest.mark.slow
@pytest.mark.sample("*-shard_map", "random_fsam-True-2-*")
def test_options_combine_on_devices(runner, method, sync, groups):
    tx = sam_optax.sharpness_aware(
        optax.sgd(0.1),
        make(method, 0.1),
        axis_name="batch",
        sync_perturbation=sync,
        when=sam_optax.every(2),
        ascent_steps=3,
        skip_nonfinite=True,
        groups=groups,
    )

    def step(params, state, data):
        grad_fn = lambda p, i=0: jax.grad(lambda p: quadratic(p, data + i))(p)
        for _ in range(3):
            updates, state = tx.update(None, state, params, grad_fn=grad_fn)
            params = optax.apply_updates(params, updates)
        return jax.tree.map(lambda x: x[None], (params, state))

    params = {"w": jnp.array([0.3, -0.2, 0.9])}
    new, state = on_devices(runner, step)(params, tx.init(params), jax.random.normal(KEY, (4, 3)))
    assert int(state.step.ravel()[0]) == 3
    for leaf in jax.tree.leaves((new, state)):
        leaf = np.asarray(leaf).reshape(2, -1)
        np.testing.assert_array_equal(leaf[0], leaf[1])


def test_a_summed_gradient_is_refused_and_a_local_one_taken():
    tx = sam_optax.sharpness_aware(optax.sgd(1.0), sam_optax.sam(0.1), axis_name="batch")
    params = {"w": jnp.zeros(())}

    def step(params, state, data, localize):
        grad_fn = jax.grad(lambda p: quadratic(p, data))
        grads = grad_fn(sam_optax.local(params, "batch") if localize else params)
        updates, _ = tx.update(grads, state, params, grad_fn=grad_fn)
        return jax.tree.map(lambda x: x[None], updates)

    data = jnp.array([1.0, -3.0])
    with pytest.raises(ValueError, match=r"sam_optax\.local"):
        on_devices("shard_map", functools.partial(step, localize=False))(
            params, tx.init(params), data
        )
    updates = on_devices("shard_map", functools.partial(step, localize=True))(
        params, tx.init(params), data
    )
    np.testing.assert_allclose(updates["w"].ravel(), -1.0, rtol=1e-6)


def test_sync_needs_an_axis():
    with pytest.raises(ValueError, match="axis_name"):
        sam_optax.sharpness_aware(optax.sgd(1.0), sam_optax.sam(), sync_perturbation=True)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("p", [1, 1.5, 2, np.inf])
@pytest.mark.parametrize("factory", [sam_optax.sam, lambda rho, p: sam_optax.asam(rho, p=p)])
@pytest.mark.slow
def test_norms_span_the_axis_that_params_are_sharded_over(factory, p, check_vma):
    tx = sam_optax.sharpness_aware(optax.sgd(1.0), factory(0.5, p=p), norm_axis_name="model")
    params = {"w": jnp.array([3.0, 4.0, -1.0, 0.5]), "b": jnp.array([2.0])}
    gradient = lambda q: {"w": q["w"] ** 2, "b": q["b"] * 2}

    def step(params):
        return tx.update(None, tx.init(params), params, grad_fn=gradient)[0]

    single = sam_optax.sharpness_aware(optax.sgd(1.0), factory(0.5, p=p))
    expected, _ = single.update(None, single.init(params), params, grad_fn=gradient)
    specs = {"w": P("model"), "b": P() if check_vma else P("model")}
    if not check_vma:  # replicated leaves cannot be told apart: shard them all
        params["b"] = jnp.array([2.0, 1.0])
        expected, _ = single.update(None, single.init(params), params, grad_fn=gradient)
    run = jax.shard_map(
        step,
        mesh=mesh(2, names=("model",)),
        in_specs=(specs,),
        out_specs=specs,
        check_vma=check_vma,
    )
    updates = jax.jit(run)(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), updates, expected)


def test_norm_axis_refuses_cut_kernels():
    with pytest.raises(ValueError, match="random start"):
        sam_optax.sharpness_aware(optax.sgd(1.0), make("rsam", 0.1), norm_axis_name="model")
    tx = sam_optax.sharpness_aware(
        optax.sgd(1.0), sam_optax.asam(normalization="filterwise"), norm_axis_name="model"
    )
    step = lambda w: tx.update(None, tx.init(w), w, grad_fn=lambda w: w)
    with pytest.raises(ValueError, match="filterwise"):
        jax.vmap(step, axis_name="model")(jnp.ones((2, 2)))


@pytest.mark.parametrize("name", ["axis_name", "norm_axis_name"])
@pytest.mark.parametrize("jit", [False, True])
def test_an_axis_that_is_not_bound_is_named(name, jit):
    w = jnp.ones(2)
    for combine in (sam_optax.sharpness_aware, sam_optax.simultaneous):
        if (combine, name) == (sam_optax.simultaneous, "norm_axis_name"):
            continue
        tx = combine(optax.sgd(1.0), sam_optax.sam(), **{name: "batch"})
        step = lambda w: tx.update(None, tx.init(w), w, grad_fn=lambda w: w)  # noqa: B023
        with pytest.raises(ValueError, match=rf"^{name}='batch' names an axis that is not bound"):
            (jax.jit(step) if jit else step)(w)


# ---------------------------------------------------------------- devices that would drift apart


def drifting(w, c, **options):
    """The usual loop under ``pmap``: averaged ``grads``, and each device's own ``grad_fn``."""
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.sam(0.1), **options)
    grad_fn = lambda w: w - c
    return tx.update(jax.lax.pmean(grad_fn(w), "batch"), tx.init(w), w, grad_fn=grad_fn)[0]


def run_drifting(runner, **options):
    step = functools.partial(drifting, **options)
    w, c = jnp.zeros((2, 1)), jnp.array([[1.0], [-3.0]])
    if runner in ("pmap", "vmap"):
        return getattr(jax, runner)(step, axis_name="batch")(w, c)
    check = runner == "shard_map"
    specs = {"in_specs": (P(), P("batch")), "out_specs": P("batch"), "check_vma": check}
    return jax.shard_map(step, mesh=mesh(2), **specs)(w[0], c[:, 0])


SHOWN = hasattr(jax.sharding, "get_abstract_mesh")
NO_AXIS = r"sharpness_aware is traced under the axis 'batch'.*axis_name='batch'.*axis_name=\(\)"


@pytest.mark.skipif(not SHOWN, reason="this jax does not name the axes of a trace")
@pytest.mark.parametrize("runner", RUNNERS)
def test_devices_that_would_drift_apart_are_warned_of(runner):
    with pytest.warns(UserWarning, match=NO_AXIS):
        updates = run_drifting(runner)
    assert np.ptp(np.asarray(updates)) > 0.1  # they do
    updates = run_drifting(runner, axis_name=())  # each device's own params, as said
    assert np.ptp(np.asarray(updates)) > 0.1


def test_the_axis_of_vmap_is_no_device_axis():
    assert np.ptp(np.asarray(run_drifting("vmap"))) > 0.1


@pytest.mark.skipif(not SHOWN, reason="this jax does not name the axes of a trace")
def test_simultaneous_warns_too():
    tx = sam_optax.simultaneous(optax.sgd(0.1), sam_optax.sam(0.1))
    both = lambda c: dict.fromkeys(("grad_fn", "previous_grad_fn"), lambda w: w - c)
    step = lambda w, c: tx.update(None, tx.init(w), w, **both(c))[0]
    with pytest.warns(UserWarning, match="simultaneous is traced under the axis 'batch'"):
        jax.pmap(step, axis_name="batch")(jnp.zeros((2, 1)), jnp.array([[1.0], [-3.0]]))


def test_gradients_that_do_not_differ_are_no_drift():
    """With ``check_vma``, the gradient with respect to replicated params is summed."""
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.sam(0.1))

    def step(w, c):
        grad_fn = jax.grad(lambda w: 0.5 * jnp.sum((w - c) ** 2))
        return tx.update(None, tx.init(w), w, grad_fn=grad_fn)[0]

    specs = {"in_specs": (P(), P("batch")), "out_specs": P()}
    jax.shard_map(step, mesh=mesh(2), **specs)(jnp.zeros(1), jnp.array([1.0, -3.0]))


def test_averaged_gradients_with_an_axis_are_refused_where_it_shows():
    with pytest.raises(ValueError, match=r"grads must be each device's own.*been averaged"):
        run_drifting("shard_map", axis_name="batch")


def test_lookbehind_refuses_averaged_gradients_where_it_shows():
    tx = sam_optax.lookbehind(optax.sgd(0.1), sam_optax.sam(0.1), 2, axis_name="batch")
    step = lambda w: tx.update(w, tx.init(w), w, grad_fn=lambda w: w)[0]
    with pytest.raises(ValueError, match=r"grads must be each device's own.*been averaged"):
        jax.shard_map(step, mesh=mesh(2), in_specs=P(), out_specs=P())(jnp.ones(1))


@pytest.mark.parametrize("piece", ["random_mask", "stochastic_rounding"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_each_shard_of_the_params_has_its_own_draws(piece, check_vma):
    """And leaves that are replicated over the axis the same ones, as far as their types show it."""
    if piece == "random_mask":
        method = sam_optax.random_mask(0.5, key=KEY)
    else:
        method = sam_optax.stochastic_rounding(optax.scale(0.003), key=KEY)
    eps = {"cut": jnp.ones(256, jnp.bfloat16), "whole": jnp.ones(128, jnp.bfloat16)}

    def draw(eps):
        found, _ = method.update(eps, method.init(eps), eps, norm_axis_name="batch")
        return found["cut"], found["whole"][None]

    specs = {"cut": P("batch"), "whole": P()}
    cut, whole = jax.shard_map(
        draw, mesh=mesh(2), in_specs=(specs,), out_specs=P("batch"), check_vma=check_vma
    )(eps)
    assert not np.array_equal(cut[:128], cut[128:])
    assert len(np.unique(np.asarray(cut, np.float32))) > 1
    if check_vma:
        np.testing.assert_array_equal(whole[0], whole[1])


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("given", [True, False])
def test_lookbehind_averages_its_gradients(runner, given):
    """Two devices with half of the batch each take the step of one with all of it."""
    centres = jnp.array([[1.0, 2.0], [-3.0, 0.5]])
    params = {"w": jnp.array([0.3, -0.2])}

    def stepper(axis):
        tx = sam_optax.lookbehind(
            optax.sgd(0.1, momentum=0.9), sam_optax.sam(0.1), 3, axis_name=axis
        )

        def step(params, state, data):
            grad_fn = jax.grad(lambda p: quadratic(p, data))
            grads = grad_fn(sam_optax.local(params, axis)) if given else None
            return tx.update(grads, state, params, grad_fn=grad_fn)[0]["w"][None]

        return tx, step

    tx, step = stepper("batch")
    found = on_devices(runner, step)(params, tx.init(params), centres)
    _, alone = stepper(None)
    expected = alone(params, tx.init(params), centres)[0]
    for row in np.asarray(found).reshape(2, 2):
        np.testing.assert_allclose(row, expected, rtol=1e-5)
