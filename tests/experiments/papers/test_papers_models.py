"""The papers' networks: their sizes are the published ones, and they take a training step."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sam_optax
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.papers import architectures
from sam_optax.experiments.papers.resnet import Basic, Bottleneck, ResNet
from sam_optax.experiments.papers.vit import VisionTransformer
from sam_optax.experiments.papers.wide_resnet import WideResNet
from sam_optax.training import TrainState

# (classes, image size, params). He et al. print 0.27 M for ResNet-20 and 0.46 M for ResNet-32
# (table 6), Zagoruyko & Komodakis 11.0 M for WRN-16-8 and 36.5 M for WRN-28-10 (table 4),
# Dosovitskiy et al. 86 M for ViT-B (table 1). The exact numbers are those of the public
# implementations.
PUBLISHED = {
    "resnet20": (10, 32, 269_722),
    "resnet32": (10, 32, 464_154),
    "resnet18": (10, 32, 11_173_962),
    "resnet50": (10, 32, 23_520_842),
    "resnet50_imagenet": (1000, 224, 25_557_032),
    "wrn16_8": (10, 32, 10_961_370),
    "wrn28_10": (10, 32, 36_479_194),
    "vit_s16": (1000, 224, 22_050_664),
    "vit_b16": (1000, 224, 86_567_656),
}


def parameters(model, size):
    """The number of params, without allocating any."""
    image = jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32)
    variables = jax.eval_shape(partial(model.init, train=False), jax.random.key(0), image)
    return sum(leaf.size for leaf in jax.tree.leaves(variables["params"]))


@pytest.mark.parametrize(("name", "expected"), PUBLISHED.items(), ids=PUBLISHED)
def test_parameter_count(name, expected):
    classes, size, count = expected
    assert parameters(architectures.build(name, classes, size), size) == count


def test_every_network_is_counted():
    assert set(PUBLISHED) == set(architectures.ARCHITECTURES) - {"tiny", "flat"}


TINY = {
    "basic": (partial(ResNet, stages=(1,), width=4), 4),
    "bottleneck": (partial(ResNet, stages=(1,), width=4, block=Bottleneck, stem="imagenet"), 8),
    "wide": (partial(WideResNet, depth=10, widen=1), 4),
    "vit": (partial(VisionTransformer, width=8, depth=1, heads=2, patch=4), 8),
}


# (Basic blocks are trained in the tests of the command.)
@pytest.mark.parametrize("name", ["bottleneck", "wide", "vit"])
def test_a_step_lowers_the_loss(name):
    make, size = TINY[name]
    model = make(classes=3)
    x = jax.random.normal(jax.random.key(0), (6, size, size, 3))
    y = jnp.arange(6) % 3
    variables = jax.jit(partial(model.init, train=False))(jax.random.key(1), x)
    stats = variables.get("batch_stats", {})
    tx = sam_optax.sharpness_aware(optax.sgd(0.01), sam_optax.sam(0.01))
    state = TrainState.create(apply_fn=model.apply, params=variables["params"], tx=tx)

    def loss_fn(params):
        variables = {"params": params, "batch_stats": stats}
        logits, new = model.apply(variables, x, train=True, mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        return loss, new.get("batch_stats", {})

    jitted = jax.jit(loss_fn)
    state, (before, new_stats) = jax.jit(lambda s: s.apply_loss(loss_fn, has_aux=True))(state)
    after, _ = jitted(state.params)
    assert after < before
    moved = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), stats, new_stats)
    assert all(jax.tree.leaves(moved))


@pytest.mark.parametrize(("make", "size"), TINY.values(), ids=TINY)
def test_bfloat16_computes_in_it_and_keeps_float32_params(make, size):
    x = jax.ShapeDtypeStruct((2, size, size, 3), jnp.float32)
    model = make(classes=3, dtype=jnp.bfloat16)
    init = partial(model.init_with_output, train=True)
    logits, variables = jax.eval_shape(init, jax.random.key(0), x)
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {np.dtype("float32")}
    assert logits.dtype == jnp.float32
    capture = lambda module, _: isinstance(module, nn.Conv)
    _, inner = jax.eval_shape(
        partial(model.apply, train=False, capture_intermediates=capture),
        variables,
        x,
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(inner)} == {jnp.dtype(jnp.bfloat16)}


def test_a_shortcut_without_params_is_every_other_pixel_and_zero_channels():
    block = Basic(4, 2, False, partial(nn.BatchNorm, use_running_average=True), jnp.float32)
    x = jax.random.normal(jax.random.key(0), (1, 4, 4, 2)) ** 2
    variables = block.init(jax.random.key(1), x)
    dead = jax.tree.map(jnp.zeros_like, variables["params"])
    y = block.apply({**variables, "params": dead}, x)
    expected = jnp.pad(x[:, ::2, ::2], ((0, 0), (0, 0), (0, 0), (1, 1)))
    np.testing.assert_array_equal(y, expected)


def test_unknown_network():
    with pytest.raises(UserError, match="--model vgg: unknown network; use one of resnet20"):
        architectures.build("vgg", 10, 32)


def test_images_that_do_not_divide_into_patches():
    with pytest.raises(UserError, match=r"images of 30×30 cannot be cut .*--image-size"):
        architectures.build("vit_s16", 10, 30)
