"""Data-parallel devices: averaged gradients, per-device and synchronized perturbations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close
from jax.sharding import PartitionSpec as P
from methods import FOUR, make, often

import sam_optax

if not hasattr(jax, "shard_map"):
    pytest.skip("jax.shard_map is newer than this jax", allow_module_level=True)

KEY = jax.random.key(3)
RUNNERS = ("pmap", "shard_map", "shard_map without check_vma")
PARAMS = {"w": jnp.array([0.3, -0.2, 0.9])}
sharpness_aware = functools.partial(sam_optax.sharpness_aware, axis_name="batch")
both_syncs = pytest.mark.parametrize("sync", [True, False])


def mesh(*shape, names=("batch",)):
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return jax.sharding.Mesh(devices, names)


def on_two_devices(runner, step):
    """``step(params, state, data)``, with params and state replicated and the data split.

    Every leaf of the result gets a leading axis, so that devices can be told apart.
    """
    told_apart = lambda *args: jax.tree.map(lambda x: x[None], step(*args))
    if runner == "pmap":
        halves = lambda data: jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), data)
        mapped = jax.pmap(
            step, axis_name="batch", in_axes=(None, None, 0), devices=jax.devices()[:2]
        )
        return lambda params, state, data: mapped(params, state, halves(data))
    specs = {"in_specs": (P(), P(), P("batch")), "out_specs": P("batch")}
    check_vma = runner == "shard_map"
    return jax.jit(jax.shard_map(told_apart, mesh=mesh(2), check_vma=check_vma, **specs))


def quadratic(params, centres):
    return jnp.mean(jax.vmap(lambda c: 0.5 * jnp.sum((params["w"] - c) ** 2))(centres))


def bent(params, x):
    """Not quadratic: the mean of perturbed gradients is not that of a mean perturbation."""
    return jnp.mean(jnp.sum(jnp.tanh(x * params["w"]) ** 2, -1))


def steps(tx, loss, n=1):
    def run(params, state, data):
        grad_fn = lambda p, *group: jax.grad(lambda p: loss(p, data + sum(group)))(p)
        for _ in range(n):
            updates, state = tx.update(None, state, params, grad_fn=grad_fn)
            params = optax.apply_updates(params, updates)
        return params, state

    return run


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(("sync", "gradient"), [(True, 1.1), (False, 1.0)])
def test_two_devices_by_hand(runner, sync, gradient):
    tx = sharpness_aware(optax.sgd(1.0), sam_optax.sam(0.1), sync_perturbation=sync)
    params = {"w": jnp.zeros(())}
    run = on_two_devices(runner, steps(tx, quadratic))
    new, _ = run(params, tx.init(params), jnp.array([1.0, -3.0]))
    np.testing.assert_allclose(new["w"], [-gradient] * 2, rtol=1e-6)


OPTIONS = {"when": sam_optax.every(2), "ascent_steps": 3, "skip_nonfinite": True, "groups": 2}


@both_syncs
@pytest.mark.parametrize(
    ("name", "options", "runner"),
    [
        *((name, {}, RUNNERS[-1]) for name in (*FOUR, "random_fsam")),
        *(("random_fsam", OPTIONS, runner) for runner in RUNNERS),
    ],
)
@pytest.mark.slow
def test_state_is_the_same_on_all_devices(name, options, runner, sync):
    tx = sharpness_aware(optax.adam(0.1), make(name, 0.1), sync_perturbation=sync, **options)
    run = on_two_devices(runner, steps(tx, quadratic, n=3))
    params, state = run(PARAMS, tx.init(PARAMS), jax.random.normal(KEY, (8, 3)))
    for leaf in jax.tree.leaves((params, state)):
        np.testing.assert_array_equal(*np.asarray(leaf))
    assert np.all(np.isfinite(params["w"]))
    assert state.step.tolist() == [3, 3]


def trajectory(data, sync=None, name="fsam"):
    """Three steps, on one device or on the first of two."""
    options = {"axis_name": None} if sync is None else {"sync_perturbation": sync}
    tx = sharpness_aware(optax.sgd(0.1), make(name, 0.5), **options)
    run = steps(tx, bent, n=3)
    if sync is None:
        return jax.jit(run)(PARAMS, tx.init(PARAMS), data)[0]["w"]
    return on_two_devices("shard_map", run)(PARAMS, tx.init(PARAMS), data)[0]["w"][0]


@both_syncs
def test_identical_data_on_two_devices_equals_one_device(sync):
    data = jax.random.normal(KEY, (4, 3))
    assert_close(trajectory(jnp.concatenate([data] * 2), sync), trajectory(data), 1e-5)


def test_synchronized_equals_one_device_with_the_whole_batch():
    """Draws included. Per-device perturbations do not: the control."""
    data = jax.random.normal(KEY, (4, 3))
    run = functools.partial(trajectory, data, name="random_fsam")
    assert_close(run(sync=True), run(), 1e-5)
    assert np.abs(run(sync=False) - run()).max() > 1e-4


def test_nested_axes():
    axes = ("host", "batch")
    tx = sam_optax.sharpness_aware(
        optax.sgd(1.0), sam_optax.sam(0.1), axis_name=axes, sync_perturbation=True
    )
    params = {"w": jnp.zeros(())}
    places = {"mesh": mesh(2, 2, names=axes), "in_specs": (P(), P(), P(axes)), "out_specs": P()}
    step = jax.jit(jax.shard_map(steps(tx, quadratic), **places))
    new, _ = step(params, tx.init(params), jnp.array([1.0, -3.0, 1.0, -3.0]))
    np.testing.assert_allclose(new["w"], -1.1, rtol=1e-6)


def test_a_summed_gradient_is_refused_and_a_local_one_taken():
    tx = sharpness_aware(optax.sgd(1.0), sam_optax.sam(0.1))
    params = {"w": jnp.zeros(())}

    def step(localize, params, state, data):
        grad_fn = jax.grad(lambda p: quadratic(p, data))
        grads = grad_fn(sam_optax.local(params, "batch") if localize else params)
        return tx.update(grads, state, params, grad_fn=grad_fn)[0]

    run = lambda localize: on_two_devices("shard_map", functools.partial(step, localize))(
        params, tx.init(params), jnp.array([1.0, -3.0])
    )
    with pytest.raises(ValueError, match=r"sam_optax\.local"):
        run(localize=False)
    np.testing.assert_allclose(run(localize=True)["w"], [-1.0, -1.0], rtol=1e-6)


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("p", often([1, 1.5, 2, np.inf], 2))
def test_norms_span_the_axis_that_params_are_sharded_over(p, check_vma):
    params = {"w": jnp.array([3.0, 4.0, -1.0, 0.5]), "b": jnp.array([2.0, 1.0])}
    # Without check_vma, replicated leaves cannot be told apart: shard them all.
    specs = {"w": P("model"), "b": P() if check_vma else P("model")}

    def step(params, axis=None):
        tx = sam_optax.sharpness_aware(
            optax.sgd(1.0), sam_optax.asam(0.5, p=p), norm_axis_name=axis
        )
        gradient = lambda q: {"w": q["w"] ** 2, "b": q["b"] * 2}
        return tx.update(None, tx.init(params), params, grad_fn=gradient)[0]

    places = {"mesh": mesh(2, names=("model",)), "in_specs": (specs,), "out_specs": specs}
    run = jax.shard_map(functools.partial(step, axis="model"), check_vma=check_vma, **places)
    assert_close(jax.jit(run)(params), step(params), 1e-5)


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("sam", {"sync_perturbation": True}, "sync_perturbation=True needs axis_name"),
        ("rsam", {"norm_axis_name": "model"}, "norm_axis_name='model' .* random start"),
        ("asam_filterwise", {"norm_axis_name": "model"}, "filterwise"),
    ],
)
def test_axes_that_cannot_be(method, options, message):
    def step(w):
        tx = sam_optax.sharpness_aware(optax.sgd(1.0), make(method), **options)
        return tx.update(None, tx.init(w), w, grad_fn=lambda w: w)

    with pytest.raises(ValueError, match=message):
        jax.vmap(step, axis_name="model")(jnp.ones((2, 2)))


@pytest.mark.parametrize(
    ("combine", "name"),
    [
        (sam_optax.sharpness_aware, "axis_name"),
        (sam_optax.sharpness_aware, "norm_axis_name"),
        (sam_optax.simultaneous, "axis_name"),
        (functools.partial(sam_optax.lookbehind, k=2), "axis_name"),
    ],
)
def test_an_axis_that_is_not_bound_is_named(combine, name):
    w = jnp.ones(2)
    tx = combine(optax.sgd(1.0), sam_optax.sam(), **{name: "batch"})
    with pytest.raises(ValueError, match=rf"^{name}='batch' names an axis that is not bound"):
        jax.jit(lambda w: tx.update(None, tx.init(w), w, grad_fn=lambda w: w))(w)


# ---------------------------------------------------------------- devices that would drift apart


def run_drifting(runner, **options):
    """The usual loop under ``pmap``: averaged ``grads``, and each device's own ``grad_fn``."""
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.sam(0.1), **options)

    def step(params, state, c):
        grad_fn = lambda w: w - c[0]
        grads = jax.lax.pmean(grad_fn(params), "batch")
        return tx.update(grads, state, params, grad_fn=grad_fn)[0]

    w = jnp.zeros(1)
    return on_two_devices(runner, step)(w, tx.init(w), jnp.array([1.0, -3.0]))


SHOWN = hasattr(jax.sharding, "get_abstract_mesh")
shown = pytest.mark.skipif(not SHOWN, reason="this jax does not name the axes of a trace")
NO_AXIS = r"sharpness_aware is traced under the axis 'batch'.*axis_name='batch'.*axis_name=\(\)"


@shown
@pytest.mark.parametrize("runner", RUNNERS)
def test_devices_that_would_drift_apart_are_warned_of(runner):
    with pytest.warns(UserWarning, match=NO_AXIS):
        updates = run_drifting(runner)
    assert np.ptp(np.asarray(updates)) > 0.1  # they do
    updates = run_drifting(runner, axis_name=())  # each device's own params, as said
    assert np.ptp(np.asarray(updates)) > 0.1


def test_what_does_not_drift_is_not_warned_of():
    """The axis of ``vmap``, and a gradient of replicated params, summed with ``check_vma``."""
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.sam(0.1))
    step = lambda w: tx.update(None, tx.init(w), w, grad_fn=lambda w: w)[0]
    jax.vmap(step, axis_name="batch")(jnp.ones((2, 1)))
    on_two_devices("shard_map", steps(tx, quadratic))(PARAMS, tx.init(PARAMS), jnp.ones((2, 3)))


@shown
def test_simultaneous_warns_too():
    tx = sam_optax.simultaneous(optax.sgd(0.1), sam_optax.sam(0.1))
    both = lambda c: dict.fromkeys(("grad_fn", "previous_grad_fn"), lambda w: w - c)
    step = lambda w, c: tx.update(None, tx.init(w), w, **both(c))[0]
    with pytest.warns(UserWarning, match="simultaneous is traced under the axis 'batch'"):
        jax.pmap(step, axis_name="batch")(jnp.zeros((2, 1)), jnp.array([[1.0], [-3.0]]))


@pytest.mark.parametrize(
    "combine", [sam_optax.sharpness_aware, functools.partial(sam_optax.lookbehind, k=2)]
)
def test_averaged_gradients_with_an_axis_are_refused_where_it_shows(combine):
    tx = combine(optax.sgd(0.1), sam_optax.sam(0.1), axis_name="batch")
    step = lambda w: tx.update(w, tx.init(w), w, grad_fn=lambda w: w)[0]
    with pytest.raises(ValueError, match=r"grads must be each device's own.*been averaged"):
        jax.shard_map(step, mesh=mesh(2), in_specs=P(), out_specs=P())(jnp.ones(1))


# ---------------------------------------------------------------- pieces with axes of their own


@pytest.mark.parametrize("compiled", [True, False])
def test_an_axis_of_vmap_stands_for_devices(compiled):
    """w = (3, 4), the mean of the gradients at w + ε of both members: SGD's step of each."""
    tx, w = sharpness_aware(optax.sgd(1.0), sam_optax.sam(0.1)), jnp.array([3.0, 4.0])

    def step(c):
        return tx.update(None, tx.init(w), w, grad_fn=lambda p: p - c)[0]

    mapped = jax.vmap(step, axis_name="batch")
    centres = jnp.array([[0.0, 0.0], [6.0, 8.0]])
    found = (jax.jit(mapped) if compiled else mapped)(centres)
    # ε is ±ρ (0.6, 0.8), and the mean of the gradients 0.
    np.testing.assert_allclose(found, np.zeros((2, 2)), atol=1e-6)


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
    places = {"mesh": mesh(2), "in_specs": (specs,), "out_specs": P("batch")}
    cut, whole = jax.jit(jax.shard_map(draw, check_vma=check_vma, **places))(eps)
    assert not np.array_equal(cut[:128], cut[128:])
    assert len(np.unique(np.asarray(cut, np.float32))) > 1
    if check_vma:
        np.testing.assert_array_equal(whole[0], whole[1])


@pytest.mark.parametrize("given", [True, False])
def test_lookbehind_averages_its_gradients(given):
    """Two devices with half of the batch each take the step of one with all of it."""

    def run(axis, place):
        base, method = optax.sgd(0.1, momentum=0.9), sam_optax.sam(0.1)
        tx = sam_optax.lookbehind(base, method, 3, axis_name=axis)

        def step(params, state, data):
            grad_fn = jax.grad(lambda p: quadratic(p, data))
            grads = grad_fn(sam_optax.local(params, axis)) if given else None
            return tx.update(grads, state, params, grad_fn=grad_fn)[0]

        centres = jnp.array([[1.0, 2.0, -1.0], [-3.0, 0.5, 0.0]])
        return place(step)(PARAMS, tx.init(PARAMS), centres)["w"]

    expected = run(None, jax.jit)
    found = run("batch", functools.partial(on_two_devices, "shard_map"))
    assert_close(found, jnp.stack([expected, expected]), 1e-5)
