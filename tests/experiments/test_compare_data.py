"""Data sets of the comparison: splits, scaling and label noise."""

import jax
import numpy as np
import pytest

from sam_optax.experiments import data, models
from sam_optax.experiments.errors import UserError


@pytest.mark.parametrize(
    ("name", "train", "test", "shape"),
    [("digits", 1437, 360, (8, 8, 1)), ("mnist5k", 4000, 1000, (28, 28, 1))],
)
def test_built_in_data_are_split_class_by_class(name, train, test, shape):
    dataset = data.load(name)
    assert dataset.x_train.shape == (train, *shape)
    assert dataset.x_test.shape == (test, *shape)
    assert dataset.classes == 10
    assert dataset.x_train.dtype == np.float32
    assert dataset.y_train.dtype == np.int32
    assert dataset.x_train.min() == 0
    assert dataset.x_train.max() == 1
    shares = [np.bincount(y) / len(y) for y in (dataset.y_train, dataset.y_test)]
    np.testing.assert_allclose(*shares, atol=2e-3)


def test_training_and_test_examples_are_disjoint_and_always_the_same():
    first, again = data.load("digits"), data.load("digits")
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, other)
    everything = np.concatenate([first.x_train, first.x_test]).reshape(1797, -1)
    from sklearn.datasets import load_digits

    np.testing.assert_array_equal(
        np.sort(everything.sum(1)), np.sort((load_digits().data / 16).astype(np.float32).sum(1))
    )


def test_vectors_are_standardized_by_the_training_examples(archive, arrays):
    dataset = data.load(f"npz:{archive}")
    np.testing.assert_allclose(dataset.x_train.mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(dataset.x_train.std(0), 1, rtol=1e-5)
    mean, std = arrays["x_train"].mean(0), arrays["x_train"].std(0)
    np.testing.assert_allclose(dataset.x_test, (arrays["x_test"] - mean) / std, rtol=1e-5)


def test_a_constant_feature_and_a_black_image_stay_finite(tmp_path, arrays):
    x_train = arrays["x_train"].copy()
    x_train[:, 2] = 3
    np.savez(tmp_path / "a.npz", **{**arrays, "x_train": x_train})
    assert np.all(data.load(f"npz:{tmp_path / 'a.npz'}").x_train[:, 2] == 0)
    black = {"x_train": np.zeros((40, 2, 3)), "x_test": np.zeros((13, 2, 3))}
    np.savez(tmp_path / "b.npz", **{**arrays, **black})
    dataset = data.load(f"npz:{tmp_path / 'b.npz'}")
    assert dataset.x_train.shape == (40, 2, 3, 1)
    assert np.all(dataset.x_test == 0)


def test_images_keep_their_contrast(tmp_path, arrays):
    rng = np.random.default_rng(0)
    x_train, x_test = rng.integers(0, 200, (40, 4, 4, 3)), rng.integers(0, 200, (13, 4, 4, 3))
    np.savez(tmp_path / "rgb.npz", **{**arrays, "x_train": x_train, "x_test": x_test})
    dataset = data.load(f"npz:{tmp_path / 'rgb.npz'}")
    np.testing.assert_allclose(dataset.x_train, x_train / x_train.max(), rtol=1e-6)
    np.testing.assert_allclose(dataset.x_test, x_test / x_train.max(), rtol=1e-6)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.4, 0.9])
def test_exactly_the_share_of_the_labels_becomes_wrong(rate):
    y = np.random.default_rng(0).integers(0, 10, 1437)
    kept = y.copy()
    noisy = data.corrupt(y, rate, 10, np.random.default_rng(1))
    assert np.sum(noisy != y) == round(rate * 1437)
    assert noisy.min() >= 0
    assert noisy.max() < 10
    np.testing.assert_array_equal(y, kept)


def test_wrong_labels_are_uniform_over_the_other_classes_and_the_examples():
    y = np.repeat(np.arange(4), 5000)
    noisy = data.corrupt(y, 0.5, 4, np.random.default_rng(3))
    counts = np.array([np.bincount(noisy[y == c], minlength=4) for c in range(4)])
    wrong = counts[~np.eye(4, dtype=bool)]
    # 10,000 wrong labels in 12 cells: mean 833, standard deviation at most 29.
    np.testing.assert_allclose(wrong, 10_000 / 12, atol=4 * 29)
    # 2,500 expected of each class: standard deviation 31.
    np.testing.assert_allclose(counts.sum(1) - np.diag(counts), 2500, atol=4 * 31)


def test_two_classes_swap():
    y = np.arange(10) % 2
    noisy = data.corrupt(y, 0.3, 2, np.random.default_rng(0))
    np.testing.assert_array_equal(np.abs(noisy - y).sum(), 3)


@pytest.mark.parametrize("spec", ["mnist", "", "digits.npz", "NPZ:a"])
def test_an_unknown_name_is_answered_with_the_known_ones(spec):
    with pytest.raises(UserError, match=r"--dataset .*unknown.*digits, mnist5k, npz:PATH"):
        data.load(spec)


def test_models_have_one_logit_a_class():
    for name, shape in (("mlp", (6,)), ("mlp", (8, 8, 1)), ("cnn", (8, 8, 1)), ("cnn", (5, 1, 3))):
        model = models.build(name, shape, 7)
        x = np.ones((2, *shape), np.float32)
        logits, _ = jax.eval_shape(model.init_with_output, jax.random.key(0), x)
        assert logits.shape == (2, 7)


def test_models_refuse_what_they_cannot_do():
    with pytest.raises(UserError, match=r"--model vit: unknown model; use one of mlp, cnn"):
        models.build("vit", (8, 8, 1), 10)
    with pytest.raises(UserError, match=r"--model cnn: .*6 features.*use --model mlp"):
        models.build("cnn", (6,), 10)


def test_the_digest_is_of_the_contents(arrays, archive, tmp_path):
    def digest(**changed):
        np.savez(tmp_path / "other.npz", **(arrays | changed))
        return data.load(f"npz:{tmp_path / 'other.npz'}").sha256

    assert digest() == data.load(f"npz:{archive}").sha256
    x, y = arrays["x_test"].copy(), arrays["y_test"].copy()
    x[-1, -1] = np.nextafter(x[-1, -1], np.inf)
    y[-1] = 1 - y[-1]
    assert len({digest(), digest(x_test=x), digest(y_test=y)}) == 3
