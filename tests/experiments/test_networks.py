"""Networks have the published sizes and take a training step; augmentation follows its key."""

from functools import partial
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sam_optax
from sam_optax.experiments import named
from sam_optax.experiments.networks import augmentation, builtin
from sam_optax.experiments.networks.builtin import MLP
from sam_optax.training import TrainState

FILE = Path(__file__).parents[2] / "notebooks" / "networks.py"
THEIRS = named.find(f"{FILE.with_name('resnet.py')}:__dict__") | named.find(f"{FILE}:__dict__")
ResNet = THEIRS["ResNet"]


pytestmark = pytest.mark.usefixtures("compile_fast")


# (classes, image size, params). He et al. print 0.27 M for ResNet-20, 0.46 M for ResNet-32 and
# 0.85 M for ResNet-56 (table 6), Zagoruyko & Komodakis 11.0 M for WRN-16-8 and 36.5 M for WRN-28-10
# (table 4), Dosovitskiy et al. 86 M for ViT-B (table 1). The exact numbers are those of the public
# implementations: WRN-28-2 and DenseNet-121 are in the table of github.com/jvlmdr/flax-cifar,
# ResNeXt29-32x4d and PyramidNet-272 (26.0 M in the paper's, which cuts widths) in that of
# github.com/osmr/imgclsmob. NeuralFuse (Sun et al. 2024, table 7) prints VGG16-BN and VGG19-BN
# without hidden layers in the head; the two here have 512 × 513 params each.
PUBLISHED = {
    "resnet20": (10, 32, 269_722),
    "resnet32": (10, 32, 464_154),
    "resnet56": (10, 32, 853_018),
    "resnet18": (10, 32, 11_173_962),
    "resnet50": (10, 32, 23_520_842),
    "resnet50_imagenet": (1000, 224, 25_557_032),
    "resnext29_32x4d": (10, 32, 4_775_754),
    "densenet121": (10, 32, 6_956_298),
    "vgg16_bn": (10, 32, 14_728_266 + 2 * 512 * 513),
    "vgg19_bn": (10, 32, 20_040_522 + 2 * 512 * 513),
    "pyramidnet272": (10, 32, 26_210_842),
    "wrn16_8": (10, 32, 10_961_370),
    "wrn28_2": (10, 32, 1_467_610),
    "wrn28_10": (10, 32, 36_479_194),
    "vit_s16": (1000, 224, 22_050_664),
    "vit_b16": (1000, 224, 86_567_656),
}


def traced(model, shape, **options):
    """Logits and variables of a batch of two, without computing any."""
    x = jax.ShapeDtypeStruct((2, *shape), jnp.float32)
    return jax.eval_shape(partial(model.init_with_output, **options), jax.random.key(0), x)


@pytest.mark.parametrize(
    "name",
    [  # Which is traced for long.
        pytest.param(name, marks=[pytest.mark.slow] if "pyramid" in name else [])
        for name in PUBLISHED
    ],
)
def test_params_are_as_many_as_published(name):
    classes, size, count = PUBLISHED[name]
    logits, variables = traced(THEIRS[name](classes=classes), (size, size, 3), train=False)
    assert logits.shape == (2, classes)
    assert sum(leaf.size for leaf in jax.tree.leaves(variables["params"])) == count


bottleneck = partial(ResNet, block=THEIRS["Bottleneck"], stem="imagenet")
TINY = {
    "bottleneck": (partial(bottleneck, stages=(1,), width=4), 8),
    "wide": (THEIRS["wide"](depth=10, widen=1), 4),
    "vit": (partial(THEIRS["VisionTransformer"], width=8, depth=1, heads=2, patch=4), 8),
    "grouped": (partial(THEIRS["ResNeXt"], stages=(1,), groups=2), 4),
    "dense": (partial(THEIRS["DenseNet"], blocks=(1, 1), growth=2), 4),
    "vgg": (partial(THEIRS["VGG"], stages=(1, 1), width=4, dropout=0.1), 4),
    "pyramid": (partial(THEIRS["PyramidNet"], depth=11, alpha=6), 4),
}


# (Basic blocks are trained in the tests of the command.)
@pytest.mark.parametrize(("make", "size"), TINY.values(), ids=TINY)
@pytest.mark.slow
def test_a_step_lowers_the_loss(make, size):
    model = make(classes=3)
    x = jax.random.normal(jax.random.key(0), (6, size, size, 3))
    y = jnp.arange(6) % 3
    variables = jax.jit(partial(model.init, train=False))(jax.random.key(1), x)
    key = {"dropout": jax.random.key(2)}
    stats = variables.get("batch_stats", {})
    tx = sam_optax.sharpness_aware(optax.sgd(0.01), sam_optax.sam(0.01))
    state = TrainState.create(apply_fn=model.apply, params=variables["params"], tx=tx)

    def loss_fn(params):
        variables = {"params": params, "batch_stats": stats}
        logits, new = model.apply(variables, x, train=True, mutable=["batch_stats"], rngs=key)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        return loss, new.get("batch_stats", {})

    step = jax.jit(lambda state: state.apply_loss(loss_fn, has_aux=True))
    state, (before, new_stats) = step(state)
    _, (after, _) = step(state)  # each step returns the loss before it
    assert after < before
    moved = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), stats, new_stats)
    assert all(jax.tree.leaves(moved))


@pytest.mark.parametrize("name", builtin.NETWORKS)
def test_oblong_images_of_five_channels(name):
    logits, _ = traced(builtin.build(name, (8, 4, 5), 3), (8, 4, 5), train=True)
    assert logits.shape == (2, 3)


def test_a_shortcut_without_params_is_every_other_pixel_and_zero_channels():
    norm = partial(nn.BatchNorm, use_running_average=True)
    block = THEIRS["Basic"](4, 2, False, norm, jnp.float32)
    x = jax.random.normal(jax.random.key(0), (1, 4, 4, 2)) ** 2
    variables = block.init(jax.random.key(1), x)
    dead = jax.tree.map(jnp.zeros_like, variables["params"])
    y = block.apply({**variables, "params": dead}, x)
    expected = jnp.pad(x[:, ::2, ::2], ((0, 0), (0, 0), (0, 0), (1, 1)))
    np.testing.assert_array_equal(y, expected)


def test_shake_drop_shakes_the_branch_and_its_gradient_apart():
    branch, keep, n = named.find(f"{FILE}:ShakeDrop")(0.7), 0.7, 4000
    x = jnp.ones((n, 1, 1, 2))
    drop = lambda x: branch.apply({}, x, True, rngs={"dropout": jax.random.key(0)})
    y, pull = jax.vjp(drop, x)
    (back,) = pull(x)
    np.testing.assert_array_equal(y[..., 0], y[..., 1])  # one draw for an image
    kept = np.asarray(y[:, 0, 0, 0] == 1)
    assert abs(kept.mean() - keep) < 0.03
    alpha, beta = np.asarray(y)[~kept, 0, 0, 0], np.asarray(back)[~kept, 0, 0, 0]
    np.testing.assert_array_equal(np.asarray(back)[kept], 1)
    for found, low in ((alpha, -1), (beta, 0)):
        assert low <= found.min() < low + 0.05
        assert 0.95 < found.max() <= 1
    assert abs(np.corrcoef(alpha, beta)[0, 1]) < 0.1
    np.testing.assert_allclose(branch.apply({}, x, False), keep)


@pytest.mark.slow
def test_dropout_around_a_network_drops_outputs_of_the_named_layers():
    plain = MLP(classes=5, width=8)
    network = named.find(f"{FILE}:Dropout")(plain, 0.25, ("Dense_2",))  # the last one
    x = jax.random.normal(jax.random.key(0), (50, 4))
    variables = network.init(jax.random.key(1), x, train=False)
    logits = plain.apply({"params": variables["params"]["network"]}, x, train=False)

    def found(key, train):
        return network.apply(variables, x, train=train, rngs={"dropout": jax.random.key(key)})

    np.testing.assert_array_equal(found(0, False), logits)
    kept = found(0, True) != 0
    assert 0.6 < kept.mean() < 0.9
    np.testing.assert_allclose(found(0, True)[kept], logits[kept] / 0.75, rtol=1e-6)
    assert np.any(kept != (found(1, True) != 0))


class Same(nn.Module):
    def __call__(self, x, *, train):
        return x


@pytest.mark.slow
def test_random_augmentation_is_of_training_and_undoes_the_normalization():
    augment = named.find(f"{FILE.with_name('randaugment.py')}:RandAugment")
    x, rngs = jax.random.uniform(jax.random.key(0), (40, 8, 8, 3)), {"dropout": jax.random.key(1)}
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
    plain, normal = augment(Same()), augment(Same(), mean=mean, std=std)
    np.testing.assert_array_equal(plain.apply({}, x, train=False), x)
    found = plain.apply({}, x, train=True, rngs=rngs)
    assert (np.abs(found - x).max((1, 2, 3)) > 0.02).sum() > 30  # not the identity twice
    of_normal = normal.apply({}, (x - np.array(mean)) / np.array(std), train=True, rngs=rngs)
    assert np.mean(np.abs(of_normal * np.array(std) + np.array(mean) - found)) < 0.005


@pytest.mark.slow
def test_random_augmentations_are_those_of_pillow():
    """Of operations whose direction is not drawn, at full strength and half of it."""
    from PIL import Image, ImageEnhance, ImageOps

    rows, columns = np.mgrid[:64, :64]
    red, green = 20 + 2 * columns + rows / 2, 150 - 2 * rows + columns / 3
    pixels = np.stack([red, green, 100 + 40 * np.sin(rows / 9)], -1).clip(0, 255).astype(np.uint8)
    image, x = Image.fromarray(pixels), jnp.asarray(pixels / 255, jnp.float32)
    how = {"resample": Image.Resampling.BILINEAR, "fillcolor": (128,) * 3}
    moved = lambda *of: image.transform(image.size, Image.Transform.AFFINE, of, **how)
    expected = {
        0: image,
        1: ImageOps.autocontrast(image),
        2: ImageOps.equalize(image),
        3: image.rotate(-30, **how),
        4: ImageOps.solarize(image, 1),
        5: ImageOps.posterize(image, 4),
        8: ImageEnhance.Brightness(image).enhance(1.9),
        9: ImageEnhance.Sharpness(image).enhance(1.9),
        10: moved(1, 0.3, -0.3 * 32, 0, 1, 0),
        11: moved(1, 0, 0, 0.3, 1, -0.3 * 32),
        12: moved(1, 0, 0.45 * 64, 0, 1, 0),
        13: moved(1, 0, 0, 0, 1, 0.45 * 64),
    }
    operations = named.find(f"{FILE.with_name('randaugment.py')}:OPERATIONS")
    for i, theirs in expected.items():
        ours = 255 * np.asarray(operations[i](x, 1.0))
        assert np.mean(np.abs(ours - np.asarray(theirs))) < 1.5, i


@pytest.fixture
def images():
    return jnp.asarray(np.random.default_rng(0).uniform(1, 2, (64, 6, 6, 3)).astype(np.float32))


def test_a_crop_is_a_part_of_the_padded_image(images):
    padded = np.pad(images, ((0, 0), (2, 2), (2, 2), (0, 0)))
    found = np.asarray(augmentation.crop(jax.random.key(0), images, 2))
    offsets = []
    for whole, part in zip(padded, found, strict=True):
        hits = [
            (i, j)
            for i in range(5)
            for j in range(5)
            if np.array_equal(whole[i : i + 6, j : j + 6], part)
        ]
        assert len(hits) == 1
        offsets += hits
    assert {i for i, _ in offsets} == {j for _, j in offsets} == set(range(5))
    np.testing.assert_array_equal(augmentation.crop(jax.random.key(0), images, 0), images)


def test_a_flip_mirrors_about_half(images):
    found = augmentation.flip(jax.random.key(0), images)
    same = jnp.all(found == images, (1, 2, 3))
    mirrored = jnp.all(found == images[:, :, ::-1], (1, 2, 3))
    assert bool(jnp.all(same ^ mirrored))
    assert 20 < int(mirrored.sum()) < 44


def test_cutout_is_a_square_that_may_reach_over_the_edge(images):
    found = np.asarray(augmentation.cutout(jax.random.key(0), images, 3))
    areas = set()
    for image, whole in zip(found, np.asarray(images), strict=True):
        rows, columns = np.nonzero((image == 0).all(-1))
        height, width = np.ptp(rows) + 1, np.ptp(columns) + 1
        assert len(rows) == height * width
        np.testing.assert_array_equal(image[image != 0], whole[image != 0])
        areas.add((height, width))
    # Cut off at an edge it has 2 rows or columns (with a centre on the first or last pixel).
    assert areas == {(a, b) for a in (2, 3) for b in (2, 3)}
    np.testing.assert_array_equal(augmentation.cutout(jax.random.key(0), images, 0), images)


def test_mixup_mixes_images_and_labels_alike(images):
    labels = jnp.eye(64)
    mixup = jax.jit(augmentation.mixup, static_argnums=3)
    x, y = mixup(jax.random.key(3), images, labels, 0.4)
    share = float(y[0, 0])
    assert share == pytest.approx(float(jax.random.beta(jax.random.key(3), 0.4, 0.4)), rel=1e-6)
    np.testing.assert_allclose(np.diag(y), share, rtol=1e-6)
    np.testing.assert_allclose(y.sum(1), 1, rtol=1e-6)
    expected = share * images + (1 - share) * jnp.roll(images, 1, 0)
    np.testing.assert_allclose(x, expected, rtol=1e-5)
    unchanged = augmentation.mixup(jax.random.key(3), images, labels, 0.0)
    assert unchanged[0] is images
    assert unchanged[1] is labels


def test_normalized_pixels_have_mean_0_and_deviation_1():
    pixels = np.random.default_rng(0).integers(0, 256, (50, 4, 4, 3), np.uint8)
    mean, std = (tuple(f(pixels / 255, (0, 1, 2))) for f in (np.mean, np.std))
    found = augmentation.normalize(jnp.asarray(pixels), mean, std)
    np.testing.assert_allclose(found.mean((0, 1, 2)), 0, atol=1e-5)
    np.testing.assert_allclose(found.std((0, 1, 2)), 1, rtol=1e-5)
