"""The wider family used and misused: wrappers, wrong places, wrong trees, sharded params."""

import pickle

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, assert_same, needs_partition, vector
from jax.sharding import PartitionSpec as P

import sam_optax

SAM = sam_optax.sam(0.3)
partition = getattr(optax, "partition", optax.multi_transform)  # its name in newer versions
W = {"a": jnp.array([1.0, -2.0]), "b": jnp.array([3.0])}
DESCENTS = {
    "surrogate_gap": lambda: sam_optax.surrogate_gap(0.4),
    "mix_gradients": lambda: sam_optax.mix_gradients(2.0),
    "reuse_orthogonal": lambda: sam_optax.reuse_orthogonal(0.7),
    "match_ascent_norm": sam_optax.match_ascent_norm,
    "decoupled_sharpness": lambda: sam_optax.decoupled_sharpness(optax.identity(), 0.1, 2.0),
}
every_descent = pytest.mark.parametrize("name", DESCENTS)


def gradient(params):
    return jax.tree.map(lambda x: x**3, params)


def steps(tx, count=3, params=W, **extra):
    """Params and state after some compiled steps that donate the state."""
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        updates, state = tx.update(gradient(params), state, params, grad_fn=gradient, **extra)
        return optax.apply_updates(params, updates), state

    for _ in range(count):
        params, state = step(params, state)
    return params, state


def sharp(descent, **options):
    options = {"descent": descent, "when": sam_optax.every(2), **options}
    return sam_optax.sharpness_aware(optax.sgd(0.1), SAM, **options)


@every_descent
@pytest.mark.slow
def test_state_survives_serialization(name):
    tx = sharp(DESCENTS[name]())
    _, state = steps(tx)
    data = flax.serialization.to_bytes(state)
    assert_same(flax.serialization.from_bytes(tx.init(W), data), state)
    assert_same(pickle.loads(pickle.dumps(state)), state)


@every_descent
@pytest.mark.slow
def test_wrappers_around(name):
    expected, _ = steps(sharp(DESCENTS[name]()))
    for wrapped in (
        optax.chain(sharp(DESCENTS[name]()), optax.identity()),
        optax.apply_if_finite(sharp(DESCENTS[name]()), 2),
        sharp(DESCENTS[name](), skip_nonfinite=True),
    ):
        assert_close(steps(wrapped)[0], expected, 1e-6)


@every_descent
@pytest.mark.fast("surrogate_gap")
def test_partitions_need_masked_extra_arguments(name):
    labels = {"a": "x", "b": "y"}
    parts = {"x": DESCENTS[name](), "y": optax.identity()}
    with pytest.raises(ValueError, match=r"ascent_grads must have .*mask_compatible_extra_args"):
        steps(sharp(partition(parts, labels)), 1)
    one = sharp(partition(parts, labels, mask_compatible_extra_args=True))
    params, _ = steps(one, 2)
    # The part sees its own leaves alone; the others go by the sharp gradient.
    plain, _ = steps(sharp(optax.identity()), 2)
    assert_same(params["b"], plain["b"])
    assert np.abs(vector(params["a"]) - vector(plain["a"])).max() > 1e-4


@every_descent
@pytest.mark.parametrize("place", ["base", "wrapped"])
def test_without_the_ascent_gradient_it_is_refused(name, place):
    """Inside the base optimizer, and in a wrapper that drops extra arguments."""
    if place == "base":
        base = optax.chain(DESCENTS[name](), optax.sgd(0.1))
        tx = sam_optax.sharpness_aware(base, SAM)
    else:
        tx = sharp(optax.MultiSteps(DESCENTS[name](), 2).gradient_transformation())
    with pytest.raises(ValueError, match=rf"{name} needs ascent_grads.*as descent=.*MultiSteps"):
        steps(tx, 1)


@every_descent
def test_in_place_of_a_perturbation_it_is_refused(name):
    """There it would see the ascent gradient twice: silently plain SAM."""
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), optax.chain(DESCENTS[name](), SAM))
    with pytest.raises(ValueError, match=rf"{name} is not a perturbation: pass it as descent="):
        steps(tx, 1)


TREES = {
    "fisher": sam_optax.fisher_sam(0.3),
    "full_grads": optax.chain(sam_optax.project_out(), SAM),
}


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("wrong", [{"a": jnp.ones(2)}, jnp.ones(3), {"a": 1.0, "b": {"c": 1.0}}])
def test_trees_of_another_structure(name, wrong):
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), TREES[name])
    with pytest.raises(ValueError, match=rf"{name} must have the structure of the gradient"):
        steps(tx, 1, **{name: wrong})


@pytest.mark.parametrize(
    ("wrong", "error"),
    [(jax.value_and_grad(lambda p: p["b"][0]), TypeError), (lambda p: p["a"], ValueError)],
)
def test_ascent_gradients_of_another_structure(wrong, error):
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), SAM)
    with pytest.raises(error, match=r"the result of ascent_grad_fn must .*jax\.(value_and_)?grad"):
        steps(tx, 1, ascent_grad_fn=wrong)


def test_ascent_gradients_may_have_holes():
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), SAM)
    params, _ = steps(tx, 1, ascent_grad_fn=lambda p: {"a": p["a"], "b": None})
    w = W["a"] + 0.3 * W["a"] / jnp.linalg.norm(W["a"])
    assert_close(params["a"], W["a"] - 0.1 * w**3, 1e-6)
    assert_close(params["b"], W["b"] - 0.1 * W["b"] ** 3, 1e-6)


@needs_partition  # that optax takes no typed keys either
def test_inject_hyperparams_leaves_whole_numbers_alone():
    key = jax.random.key(0)
    for make in (sam_optax.low_pass, sam_optax.random_mask):
        assert optax.inject_hyperparams(make)(key=key).init(W).hyperparams.keys() <= {
            "gamma",
            "beta",
            "key",
        }


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", ["surrogate_gap", "reuse_orthogonal", "project_out"])
@pytest.mark.slow
def test_params_cut_up_inside_shard_map(name, check_vma):
    """Projections and norms span the devices of norm_axis_name."""
    if not hasattr(jax, "shard_map"):
        pytest.skip("jax.shard_map is newer than this jax")
    w = {"a": jnp.linspace(-1, 2, 8), "b": jnp.linspace(2, 1, 4)}
    full = {"a": jnp.ones(8), "b": jnp.arange(4.0)}

    def make(**options):
        if name == "project_out":
            return sam_optax.sharpness_aware(optax.sgd(0.1), TREES["full_grads"], **options)
        return sharp(DESCENTS[name](), **options)

    def run(tx, params, full):
        state = tx.init(params)
        for _ in range(2):
            updates, state = tx.update(None, state, params, grad_fn=gradient, full_grads=full)
            params = optax.apply_updates(params, updates)
        return params

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("model",))
    sharded = jax.jit(
        jax.shard_map(
            lambda params, full: run(make(norm_axis_name="model"), params, full),
            mesh=mesh,
            in_specs=P("model"),
            out_specs=P("model"),
            check_vma=check_vma,
        )
    )
    expected = jax.jit(lambda params, full: run(make(), params, full))(w, full)
    assert_close(sharded(w, full), expected, 1e-5)
    # Without the axis each device projects on its own part.
    first = lambda tree: jax.tree.map(lambda x: jnp.split(x, 2)[0], tree)
    alone = run(make(), first(w), first(full))
    assert np.abs(vector(alone) - vector(first(expected))).max() > 1e-4
