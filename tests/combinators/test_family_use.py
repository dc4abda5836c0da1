"""The wider family in wrong places, with wrong trees and over sharded params."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, assert_same, needs_partition, same, vector
from jax.sharding import PartitionSpec as P

import sam_optax

SGD, SAM = optax.sgd(0.1), sam_optax.sam(0.3)
W = {"a": jnp.array([1.0, -2.0]), "b": jnp.array([3.0])}
DESCENTS = {
    "surrogate_gap": sam_optax.surrogate_gap(0.4),
    "mix_gradients": sam_optax.mix_gradients(2.0),
    "reuse_orthogonal": sam_optax.reuse_orthogonal(0.7),
    "match_ascent_norm": sam_optax.match_ascent_norm(),
    "decoupled_sharpness": sam_optax.decoupled_sharpness(optax.identity(), 0.1, 2.0),
}
every_descent = pytest.mark.parametrize("name", DESCENTS)


def sharp(descent, base=SGD):
    return sam_optax.sharpness_aware(base, SAM, descent=descent)


def step(tx, **extra):
    """The updates of a first step."""
    grad_fn = lambda params: jax.tree.map(lambda x: x**3, params)
    return tx.update(None, tx.init(W), W, grad_fn=grad_fn, **extra)[0]


def test_partitions_of_a_descent_need_masked_extra_arguments():
    partition = getattr(optax, "partition", optax.multi_transform)  # its name in newer versions
    parts = {"x": DESCENTS["surrogate_gap"], "y": optax.identity()}
    labels = {"a": "x", "b": "y"}
    with pytest.raises(ValueError, match=r"ascent_grads must have .*mask_compatible_extra_args"):
        step(sharp(partition(parts, labels)))
    updates = step(sharp(partition(parts, labels, mask_compatible_extra_args=True)))
    # The part sees its own leaves alone; the others go by the sharp gradient.
    plain = step(sharp(None))
    assert_same(updates["b"], plain["b"])
    assert not same(updates["a"], plain["a"])


@every_descent
def test_a_descent_without_the_ascent_gradient_is_refused(name):
    """Inside the base optimizer, and in a wrapper that drops extra arguments."""
    piece = DESCENTS[name]
    wrapped = optax.MultiSteps(piece, 2).gradient_transformation()
    for tx in (sharp(None, optax.chain(piece, SGD)), sharp(wrapped)):
        with pytest.raises(ValueError, match=rf"{name} needs ascent_grads.*as descent=.*MultiSt"):
            step(tx)


@every_descent
def test_a_descent_in_place_of_a_perturbation_is_refused(name):
    """There it would see the ascent gradient twice: silently plain SAM."""
    tx = sam_optax.sharpness_aware(SGD, optax.chain(DESCENTS[name], SAM))
    with pytest.raises(ValueError, match=rf"{name} is not a perturbation: pass it as descent="):
        step(tx)


TREES = {
    "fisher": sam_optax.fisher_sam(0.3),
    "full_grads": optax.chain(sam_optax.project_out(), SAM),
}


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("wrong", [{"a": jnp.ones(2)}, jnp.ones(3), {"a": 1.0, "b": {"c": 1.0}}])
def test_trees_of_another_structure(name, wrong):
    tx = sam_optax.sharpness_aware(SGD, TREES[name])
    with pytest.raises(ValueError, match=rf"{name} must have the structure of the gradient"):
        step(tx, **{name: wrong})


@needs_partition  # that optax takes no typed keys either
@pytest.mark.parametrize("make", [sam_optax.low_pass, sam_optax.random_mask])
def test_inject_hyperparams_leaves_whole_numbers_alone(make):
    state = optax.inject_hyperparams(make)(key=jax.random.key(0)).init(W)
    assert state.hyperparams.keys() <= {"gamma", "beta", "key"}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", ["surrogate_gap", "reuse_orthogonal", "project_out"])
@pytest.mark.slow
def test_params_cut_up_inside_shard_map(name, check_vma):
    """Projections and norms span the devices of norm_axis_name."""
    if not hasattr(jax, "shard_map"):
        pytest.skip("jax.shard_map is newer than this jax")
    piece = sam_optax.project_out() if name == "project_out" else DESCENTS[name]

    def two_steps(g, g_s, axis="model"):
        """A step that perturbs, and one that does not."""
        extra = {"ascent_grads": g, "full_grads": g, "norm_axis_name": axis}
        first, state = piece.update(g_s, piece.init(g), g, perturbed=True, **extra)
        return first, piece.update(g, state, g, perturbed=False, **extra)[0]

    mesh, spec = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("model",)), P("model")
    cut = jax.shard_map(two_steps, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
    gradients = jnp.array([[3.0, 4.0, 1.0, 2.0], [0.5, -1.2, 3.0, 1.0]])
    whole = two_steps(*gradients, axis=None)
    assert_close(jax.jit(cut)(*gradients), whole, 1e-5)
    # Without the axis each device projects on its own part.
    alone = two_steps(*gradients[:, :2], axis=None)
    assert np.abs(vector(alone) - vector([x[:2] for x in whole])).max() > 1e-4
