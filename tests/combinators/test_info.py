"""``info=True``: the last step in numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same, vector
from jax.sharding import PartitionSpec as P
from methods import make

import sam_optax

PARAMS = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([1.0])}
H = {"a": jnp.array([1.0, 2.0]), "b": jnp.array([0.5])}
informed = functools.partial(sam_optax.sharpness_aware, optax.sgd(0.1), info=True)


def loss(params, scale=1.0):
    terms = jax.tree.map(lambda h, w: 0.5 * jnp.sum(scale * h * w**2), H, params)
    return jax.tree.reduce(jnp.add, terms)


def step(perturbation, values=True, **options):
    tx = informed(perturbation, **options)
    value_and_grad = jax.value_and_grad(lambda p: (loss(p), None), has_aux=True)
    given = {"value_and_grad_fn": value_and_grad} if values else {"grad_fn": jax.grad(loss)}
    updates, state = jax.jit(lambda s: tx.update(None, s, PARAMS, **given))(tx.init(PARAMS))
    return updates, sam_optax.pop_first_pass(state)[0].info if values else state.info


def test_numbers_of_sam():
    _, info = step(sam_optax.sam(0.5))
    g, w, h = vector(jax.grad(loss)(PARAMS)), vector(PARAMS), vector(H)
    point = w + 0.5 * g / np.linalg.norm(g)
    sharp = h * point
    cosine = g @ sharp / np.linalg.norm(g) / np.linalg.norm(sharp)
    assert cosine < 0.9999
    expected = {
        "ascent_norm": np.linalg.norm(g),
        "sharp_norm": np.linalg.norm(sharp),
        "eps_norm": 0.5,
        "cosine": cosine,
        "start_share": 0.0,
        "loss_rise": 0.5 * h @ (point**2 - w**2),
        "loss_known": True,
    }
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(info, name), value, rtol=1e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("weight", [0.0, 3.0])
def test_the_share_of_the_start(weight):
    """The cosine of ε with the displacement of the start: 1 for noise alone."""
    inner = optax.chain(optax.identity(), sam_optax.sam(0.5))
    method = sam_optax.random_start(inner, lmbda=weight, key=0)
    state = method.init(PARAMS)
    start = method.start_fn(PARAMS, state)
    point, _ = method.perturb_fn(PARAMS, jax.grad(loss)(start), state)
    delta, eps = (vector(tree) - vector(PARAMS) for tree in (start, point))
    expected = delta @ eps / np.linalg.norm(delta) / np.linalg.norm(eps)
    np.testing.assert_allclose(step(method)[1].start_share, expected, rtol=1e-5)
    assert (expected > 0.9999) == (weight == 0)


def test_nothing_is_not_a_number():
    """Case 38: not before the first step, not where the loss is not known, not at zero."""
    with jax.debug_nans(True):
        tx = informed(sam_optax.sam(0.5))
        state = jax.jit(tx.init)(PARAMS)
        assert all(leaf == 0 for leaf in state.info)
        zeros = jax.tree.map(jnp.zeros_like, PARAMS)
        _, state = tx.update(None, state, zeros, grad_fn=jax.grad(loss))
    assert all(leaf == 0 for leaf in state.info)


@pytest.mark.parametrize(
    ("name", "values", "radius"), [("sam", False, 0.3), ("rsam", True, 0.3), ("momentum", True, 0)]
)
def test_the_rise_is_unknown_without_values_or_with_a_start_of_its_own(name, values, radius):
    """There is no momentum yet at the first step."""
    _, info = step(make(name), values)
    assert (bool(info.loss_known), float(info.loss_rise)) == (False, 0)
    np.testing.assert_allclose(info.eps_norm, radius, rtol=1e-5)


def test_a_step_that_does_not_perturb():
    _, info = step(sam_optax.sam(0.5), when=sam_optax.after(1))
    assert (float(info.eps_norm), float(info.loss_rise), bool(info.loss_known)) == (0, 0, True)
    np.testing.assert_allclose(info.cosine, 1, rtol=1e-6)


def test_a_skipped_step_keeps_the_last_numbers():
    tx = informed(sam_optax.sam(0.5), skip_nonfinite=True)
    _, state = tx.update(None, tx.init(PARAMS), PARAMS, grad_fn=jax.grad(loss))
    bad = lambda p: jax.tree.map(lambda x: x * jnp.nan, p)
    _, later = tx.update(None, state, PARAMS, grad_fn=bad)
    assert int(later.skipped) == 1
    assert_same(later.info, state.info)


@pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="jax.shard_map is newer than this jax")
@pytest.mark.parametrize("options", [{}, {"groups": 2}], ids=str)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.slow
def test_the_same_on_all_devices(options, check_vma):
    mesh = jax.make_mesh((2,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = informed(sam_optax.sam(0.5), axis_name="batch", **options)

    def train(scale):
        grad_fn = lambda p, i=0: jax.grad(loss)(p, scale[0] * (1 + i))
        return tx.update(None, tx.init(PARAMS), PARAMS, grad_fn=grad_fn)[1].info

    sharded = jax.shard_map(
        train, mesh=mesh, in_specs=P("batch"), out_specs=P(), check_vma=check_vma
    )
    info = jax.jit(sharded)(jnp.array([1.0, 3.0]))
    np.testing.assert_allclose(info.eps_norm, 0.5, rtol=1e-5)
    g = 2 * (1.5 if options else 1) * vector(jax.grad(loss)(PARAMS))
    np.testing.assert_allclose(info.ascent_norm, np.linalg.norm(g), rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"skip_nonfinite": True}, {"when": sam_optax.every(2)}])
def test_diagnostics_can_be_turned_on_and_off_in_a_run(options):
    """Case 55; and the steps are as without them."""
    x, base = jnp.array([3.0, 4.0]), optax.sgd(0.1, momentum=0.9)

    def run(infos):
        params, state = x, None
        for info in infos:
            tx = sam_optax.sharpness_aware(base, make("fsam"), info=info, **options)
            state = tx.init(x) if state is None else state
            step = jax.jit(lambda s, p, tx=tx: tx.update(None, s, p, grad_fn=lambda x: x))
            updates, state = step(state, params)
            params = params + updates
            assert (state.info is not None) is info
            assert not info or state.info.ascent_norm > 0
        return params

    assert_same(run([False, True, True, False]), run([False] * 4))
