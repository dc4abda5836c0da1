"""``info=True``: the last step in numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same
from jax.sharding import PartitionSpec as P

import sam_optax

PARAMS = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([1.0])}
H = {"a": jnp.array([1.0, 2.0]), "b": jnp.array([0.5])}
KEY = jax.random.key(0)


def loss(params, scale=1.0):
    terms = jax.tree.map(lambda h, w: 0.5 * jnp.sum(scale * h * w**2), H, params)
    return jax.tree.reduce(jnp.add, terms)


def vector(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]).astype(np.float64)


def step(perturbation, values=True, **options):
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), perturbation, info=True, **options)
    state = tx.init(PARAMS)
    value_and_grad = jax.value_and_grad(lambda p: (loss(p), None), has_aux=True)
    given = {"value_and_grad_fn": value_and_grad} if values else {"grad_fn": jax.grad(loss)}
    updates, state = jax.jit(lambda s: tx.update(None, s, PARAMS, **given))(state)
    return updates, sam_optax.pop_first_pass(state)[0] if values else state


def test_numbers_of_sam():
    _, state = step(sam_optax.sam(0.5))
    g = vector(jax.grad(loss)(PARAMS))
    w, h = vector(PARAMS), vector(H)
    point = w + 0.5 * g / np.linalg.norm(g)
    sharp = h * point
    info = state.info
    np.testing.assert_allclose(info.ascent_norm, np.linalg.norm(g), rtol=1e-6)
    np.testing.assert_allclose(info.sharp_norm, np.linalg.norm(sharp), rtol=1e-6)
    np.testing.assert_allclose(info.eps_norm, 0.5, rtol=1e-5)
    cosine = g @ sharp / np.linalg.norm(g) / np.linalg.norm(sharp)
    np.testing.assert_allclose(info.cosine, cosine, rtol=1e-6)
    assert cosine < 0.9999
    np.testing.assert_allclose(info.loss_rise, 0.5 * h @ (point**2 - w**2), rtol=1e-5)
    assert info.loss_known
    assert info.start_share == 0


@pytest.mark.slow
def test_the_share_of_the_start():
    """The cosine of ε with the displacement of the start: 1 for noise alone."""
    for weight in (0.0, 3.0):
        method = sam_optax.random_start(
            optax.chain(optax.identity(), sam_optax.sam(0.5)), lmbda=weight, key=KEY
        )
        state = method.init(PARAMS)
        start = method.start_fn(PARAMS, state)
        point, _ = method.perturb_fn(PARAMS, jax.grad(loss)(start), state)
        delta, eps = (vector(tree) - vector(PARAMS) for tree in (start, point))
        expected = delta @ eps / np.linalg.norm(delta) / np.linalg.norm(eps)
        _, state = step(method)
        np.testing.assert_allclose(state.info.start_share, expected, rtol=1e-5)
        assert (expected > 0.9999) == (weight == 0)


def test_nothing_is_not_a_number():
    """Not before the first step, and not where the loss is not known."""
    with jax.debug_nans(True):
        tx = sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.sam(0.5), info=True)
        state = jax.jit(tx.init)(PARAMS)
        assert all(leaf == 0 for leaf in state.info)
        step(sam_optax.sam(0.5), values=False)
        zeros = jax.tree.map(jnp.zeros_like, PARAMS)
        _, state = tx.update(None, state, zeros, grad_fn=jax.grad(loss))
    assert all(leaf == 0 for leaf in state.info)


def test_the_rise_is_unknown_without_values():
    _, state = step(sam_optax.sam(0.5), values=False)
    assert not state.info.loss_known
    assert state.info.loss_rise == 0
    np.testing.assert_allclose(state.info.eps_norm, 0.5, rtol=1e-5)


@pytest.mark.parametrize("name", ["rsam", "momentum"])
def test_a_start_of_its_own_has_no_loss_at_the_params(name):
    methods = {
        "rsam": lambda: sam_optax.rsam(0.5, key=KEY),
        "momentum": lambda: sam_optax.momentum_start(sam_optax.sam(0.5), 0.9),
    }
    _, state = step(methods[name]())
    assert not state.info.loss_known
    assert state.info.loss_rise == 0
    expected = {"rsam": 0.5, "momentum": 0.0}[name]  # there is no momentum yet
    np.testing.assert_allclose(state.info.eps_norm, expected, rtol=1e-5)


def test_a_step_that_does_not_perturb():
    _, state = step(sam_optax.sam(0.5), when=sam_optax.after(1))
    np.testing.assert_allclose(
        np.array([state.info.eps_norm, state.info.cosine, state.info.loss_rise]),
        [0, 1, 0],
        rtol=1e-6,
    )


def test_a_skipped_step_keeps_the_last_numbers():
    tx = sam_optax.sharpness_aware(
        optax.sgd(0.1), sam_optax.sam(0.5), info=True, skip_nonfinite=True
    )
    grad = jax.grad(loss)
    _, state = tx.update(None, tx.init(PARAMS), PARAMS, grad_fn=grad)
    bad = lambda p: jax.tree.map(lambda g: g * jnp.nan, grad(p))
    _, later = tx.update(None, state, PARAMS, grad_fn=bad)
    assert int(later.skipped) == 1
    assert_same(later.info, state.info)


def test_zero_gradients_are_finite():
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.sam(0.5), info=True)
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    _, state = tx.update(zeros, tx.init(PARAMS), PARAMS, grad_fn=lambda p: zeros)
    assert [float(x) for x in state.info[:4]] == [0, 0, 0, 0]


def test_nothing_changes_and_nothing_is_kept_without_it():
    updates, _ = step(sam_optax.sam(0.5))
    plain = sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.sam(0.5))
    expected, state = jax.jit(lambda s: plain.update(None, s, PARAMS, grad_fn=jax.grad(loss)))(
        plain.init(PARAMS)
    )
    assert_same(updates, expected)
    assert state.info is None


@pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="jax.shard_map is newer than this jax")
@pytest.mark.parametrize("options", [{}, {"groups": 2}], ids=str)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.slow
def test_the_same_on_all_devices(options, check_vma):
    mesh = jax.make_mesh((2,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = sam_optax.sharpness_aware(
        optax.sgd(0.1), sam_optax.sam(0.5), info=True, axis_name="batch", **options
    )

    def train(scale):
        def grad_fn(p, *group):
            return jax.grad(loss)(p, scale[0] * (1 + group[0] if group else 1))

        state = tx.init(PARAMS)
        _, state = tx.update(None, state, PARAMS, grad_fn=grad_fn)
        return state.info

    sharded = jax.shard_map(
        train, mesh=mesh, in_specs=P("batch"), out_specs=P(), check_vma=check_vma
    )
    info = jax.jit(sharded)(jnp.array([1.0, 3.0]))
    np.testing.assert_allclose(info.eps_norm, 0.5, rtol=1e-5)
    factor = 2 * (1.5 if options else 1)
    g = factor * vector(jax.grad(loss)(PARAMS))
    np.testing.assert_allclose(info.ascent_norm, np.linalg.norm(g), rtol=1e-5)


def test_scan_keeps_structure_and_dtypes():
    tx = sam_optax.sharpness_aware(optax.sgd(0.01), sam_optax.fsam(0.5), info=True)

    def body(carry, _):
        params, state = carry
        updates, state = tx.update(None, state, params, grad_fn=jax.grad(loss))
        return (optax.apply_updates(params, updates), state), state.info.sharp_norm

    _, norms = jax.lax.scan(body, (PARAMS, tx.init(PARAMS)), length=3)
    assert norms.shape == (3,)
    assert np.all(np.diff(norms) < 0)


@pytest.mark.parametrize("options", [{}, {"skip_nonfinite": True}, {"when": sam_optax.every(2)}])
@pytest.mark.parametrize("jit", [False, True])
def test_diagnostics_can_be_turned_on_and_off_in_a_run(options, jit):
    make_tx = lambda info: sam_optax.sharpness_aware(
        optax.sgd(0.1, momentum=0.9), sam_optax.fsam(0.1), info=info, **options
    )
    x, grad_fn = jnp.array([3.0, 4.0]), lambda x: x
    expected = None
    for infos in ([False] * 4, [False, True, True, False]):
        params, state = x, make_tx(infos[0]).init(x)
        for info in infos:
            tx = make_tx(info)
            step = lambda s, p: tx.update(None, s, p, grad_fn=grad_fn)  # noqa: B023
            updates, state = (jax.jit(step) if jit else step)(state, params)
            params = params + updates
            assert (state.info is not None) is info
            assert not info or state.info.ascent_norm > 0
        expected = params if expected is None else expected
    assert_same(params, expected)
