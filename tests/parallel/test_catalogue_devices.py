"""The catalogue's pieces on several devices: one gradient on each, one decision, whole norms."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import sam_optax

if not hasattr(jax, "shard_map"):
    pytest.skip("jax.shard_map is newer than this jax", allow_module_level=True)

W = {"a": jnp.linspace(-1.0, 1.0, 64).reshape(8, 8), "b": jnp.linspace(0.5, 1.0, 8)[:, None]}
X = jnp.linspace(-1.0, 1.0, 32).reshape(4, 8)


def loss(w, x):
    return jnp.mean(jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"]) ** 2)


def mesh(*names, shape=(2,)):
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), names)


def stepper(tx, *names):
    """A step with the same gradient function under each of the names."""

    def step(params, state, x):
        grad_fn = lambda p: jax.grad(loss)(p, x)
        updates, state = tx.update(None, state, params, **dict.fromkeys(names, grad_fn))
        return optax.apply_updates(params, updates), state

    return step


def on_two(tx, check_vma=True):
    places = {"mesh": mesh("pass"), "in_specs": P(), "out_specs": P(), "check_vma": check_vma}
    return jax.jit(jax.shard_map(stepper(tx, "grad_fn"), **places))


def one_device(tx):
    return jax.jit(stepper(tx, "grad_fn", "previous_grad_fn"))


BASE = optax.sgd(0.5, momentum=0.9)
ALONE = sam_optax.simultaneous(BASE, sam_optax.sam(0.1))
PAIR = sam_optax.simultaneous(BASE, sam_optax.sam(0.1), axis_name="pass")


@pytest.mark.parametrize("check_vma", [True, False])
def test_two_devices_take_the_step_of_one(check_vma):
    (p, s), (q, r) = [(W, tx.init(W)) for tx in (ALONE, PAIR)]
    alone, pair = one_device(ALONE), on_two(PAIR, check_vma)
    for _ in range(3):
        p, s = alone(p, s, X)
        q, r = pair(q, r, X)
    assert_close((q, r), (p, s), 1e-5)


def test_each_device_evaluates_one_gradient():
    """Counted in the compiled program, which every device runs."""

    def dots(step, *state):
        return step.lower(W, *state, X).compile().as_text().count(" dot(")

    gradient = dots(jax.jit(jax.grad(loss)))
    assert gradient > 0
    assert dots(on_two(PAIR), PAIR.init(W)) == gradient
    assert dots(one_device(ALONE), ALONE.init(W)) == 2 * gradient
    sam = sam_optax.sharpness_aware(BASE, sam_optax.sam(0.1))
    assert dots(one_device(sam), sam.init(W)) == 2 * gradient


def test_the_batches_of_two_devices_are_their_own():
    with pytest.raises(ValueError, match="previous_grad_fn cannot be used with axis_name"):
        PAIR.update(None, PAIR.init(W), W, grad_fn=lambda p: p, previous_grad_fn=lambda p: p)


def test_devices_exchange_one_gradient_each():
    """Unless JAX asks for a proof that both hold the same."""
    gradient_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(W))
    for check_vma, times in ((False, 1), (True, 2)):
        text = on_two(PAIR, check_vma).lower(W, PAIR.init(W), X).compile().as_text()
        results = re.findall(r"= (.*) (?:all-reduce|collective-permute)\(", text)
        shapes = [shape for found in results for shape in re.findall(r"f32\[([\d,]*)\]", found)]
        sent = sum(4 * int(np.prod([int(n) for n in s.split(",") if n])) for s in shapes)
        assert sent == times * gradient_bytes


def test_an_axis_of_another_size_is_refused():
    step = jax.shard_map(
        lambda w: PAIR.update(None, PAIR.init(w), w, grad_fn=lambda p: p)[0],
        mesh=mesh("pass", shape=(4,)),
        in_specs=P(),
        out_specs=P(),
    )
    with pytest.raises(ValueError, match="axis_name='pass' must be an axis of two devices"):
        jax.jit(step)(W)


def test_all_devices_decide_alike():
    """By the mean of ‖g‖² over the devices, of which one may be above the average and one below."""
    scales = jnp.array([[0.5, 1.5], [1.0, 3.0], [0.1, 0.1], [4.0, 0.0]])

    def stepper(axis):
        tx = sam_optax.sharpness_aware(
            optax.sgd(0.1),
            sam_optax.sam(0.3),
            when=sam_optax.above_average(0.5),
            axis_name=axis,
            info=True,
        )

        def step(state, scale):
            grad_fn = lambda p: jax.tree.map(lambda x: scale[0] * x, p)
            return tx.update(None, state, W, grad_fn=grad_fn)[1]

        return tx.init(W), step

    (one, alone), (two, local) = stepper(None), stepper("batch")
    places = {"mesh": mesh("batch"), "in_specs": (P(), P("batch")), "out_specs": P()}
    both = jax.jit(jax.shard_map(local, check_vma=False, **places))
    decisions = []
    for row in scales:
        one, two = alone(one, jnp.sqrt(jnp.mean(row**2))[None]), both(two, row)
        assert_close(two.when_state, one.when_state, 1e-5)
        decisions.append((float(one.info.eps_norm) > 0, float(two.info.eps_norm) > 0))
    assert decisions == [(True, True), (True, True), (False, False), (True, True)]


@pytest.mark.parametrize(
    "piece",
    [
        sam_optax.match_ascent_norm(),
        sam_optax.away_from_eigenvector(0.3),
        sam_optax.limit_rise(optax.scale(1.0), 1.0),
    ],
)
def test_norms_span_sharded_params(piece):
    """Each of two devices holds a half; the values are those of the whole."""
    vectors = jnp.array([[3.0, 4.0], [0.5, 1.2], [0.6, 0.8]])

    def local(g, g_s, v, axis="model"):
        extra = {"ascent_grads": g, "eigenvector": v, "perturbed": True}
        return piece.update(g_s, piece.init(g), g, norm_axis_name=axis, **extra)[0]

    sharded = jax.shard_map(local, mesh=mesh("model"), in_specs=P("model"), out_specs=P("model"))
    whole = local(*vectors, axis=None)
    np.testing.assert_allclose(jax.jit(sharded)(*vectors), whole, rtol=1e-6)
    assert np.abs(whole - local(*vectors[:, :1], axis=None)).max() > 0.1
