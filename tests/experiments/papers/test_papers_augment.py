"""Augmentation: what it keeps, what it changes, and that it is a function of its key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sam_optax.experiments.papers import augment


@pytest.fixture
def images():
    return jnp.asarray(np.random.default_rng(0).uniform(1, 2, (64, 6, 6, 3)).astype(np.float32))


PIECES = {
    "crop": lambda key, x: augment.crop(key, x, 2),
    "flip": augment.flip,
    "cutout": lambda key, x: augment.cutout(key, x, 3),
}


@pytest.mark.parametrize("piece", PIECES.values(), ids=PIECES)
def test_the_same_key_draws_the_same(piece, images):
    first = piece(jax.random.key(0), images)
    np.testing.assert_array_equal(first, piece(jax.random.key(0), images))
    assert jnp.any(first != piece(jax.random.key(1), images))
    assert (first.shape, first.dtype) == (images.shape, images.dtype)


def test_a_crop_is_a_part_of_the_padded_image(images):
    padded = np.pad(images, ((0, 0), (2, 2), (2, 2), (0, 0)))
    found = np.asarray(augment.crop(jax.random.key(0), images, 2))
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
    np.testing.assert_array_equal(augment.crop(jax.random.key(0), images, 0), images)


def test_a_flip_mirrors_about_half(images):
    found = augment.flip(jax.random.key(0), images)
    same = jnp.all(found == images, (1, 2, 3))
    mirrored = jnp.all(found == images[:, :, ::-1], (1, 2, 3))
    assert bool(jnp.all(same ^ mirrored))
    assert 20 < int(mirrored.sum()) < 44


def test_cutout_is_a_square_that_may_reach_over_the_edge(images):
    found = np.asarray(augment.cutout(jax.random.key(0), images, 3))
    areas = set()
    for image, whole in zip(found, np.asarray(images), strict=True):
        rows, columns = np.nonzero((image == 0).all(-1))
        height, width = np.ptp(rows) + 1, np.ptp(columns) + 1
        assert len(rows) == height * width
        np.testing.assert_array_equal(image[image != 0], whole[image != 0])
        areas.add((height, width))
    # Cut off at an edge it has 2 rows or columns (with a centre on the first or last pixel).
    assert areas == {(a, b) for a in (2, 3) for b in (2, 3)}
    np.testing.assert_array_equal(augment.cutout(jax.random.key(0), images, 0), images)


def test_mixup_mixes_images_and_labels_alike(images):
    labels = jnp.eye(64)
    x, y = augment.mixup(jax.random.key(3), images, labels, 0.4)
    share = float(y[0, 0])
    assert 0 < share < 1
    np.testing.assert_allclose(np.diag(y), share, rtol=1e-6)
    np.testing.assert_allclose(y.sum(1), 1, rtol=1e-6)
    expected = share * images + (1 - share) * jnp.roll(images, 1, 0)
    np.testing.assert_allclose(x, expected, rtol=1e-5)
    again, _ = augment.mixup(jax.random.key(3), images, labels, 0.4)
    np.testing.assert_array_equal(x, again)
    unchanged = augment.mixup(jax.random.key(3), images, labels, 0.0)
    assert unchanged[0] is images
    assert unchanged[1] is labels


def test_shares_of_mixup_are_beta_distributed():
    keys = jax.random.split(jax.random.key(0), 2000)
    eye, x = jnp.eye(2), jnp.zeros((2, 1, 1, 1))
    shares = jax.vmap(lambda key: augment.mixup(key, x, eye, 0.5)[1][0, 0])(keys)
    # Beta(α, α) has mean 1/2 and variance 1 / (4 (2 α + 1)).
    assert abs(float(shares.mean()) - 0.5) < 0.03
    np.testing.assert_allclose(float(shares.var()), 1 / 8, rtol=0.1)


def test_normalized_pixels_have_mean_0_and_deviation_1():
    pixels = np.random.default_rng(0).integers(0, 256, (50, 4, 4, 3), np.uint8)
    mean, std = (tuple(f(pixels / 255, (0, 1, 2))) for f in (np.mean, np.std))
    found = augment.normalize(jnp.asarray(pixels), mean, std)
    np.testing.assert_allclose(found.mean((0, 1, 2)), 0, atol=1e-5)
    np.testing.assert_allclose(found.std((0, 1, 2)), 1, rtol=1e-5)


def test_label_smoothing():
    found = augment.smooth(jnp.array([2, 0]), 4, 0.1)
    expected = [[0.025, 0.025, 0.925, 0.025], [0.925, 0.025, 0.025, 0.025]]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
