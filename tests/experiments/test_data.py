"""Data sets: splits, scaling, label noise, and what is said about malformed archives."""

import numpy as np
import pytest

from sam_optax.experiments.data.dataset import load
from sam_optax.experiments.data.labels import corrupt
from sam_optax.experiments.errors import UserError


@pytest.mark.parametrize(
    ("name", "train", "test", "shape"),
    [("digits", 1437, 360, (8, 8, 1)), ("mnist5k", 4000, 1000, (28, 28, 1))],
)
def test_built_in_data_are_split_class_by_class(name, train, test, shape):
    dataset = load(name)
    assert dataset.train.x.shape == (train, *shape)
    assert dataset.test.x.shape == (test, *shape)
    assert dataset.classes == 10
    assert dataset.train.x.dtype == np.float32
    assert dataset.train.y.dtype == np.int32
    assert dataset.train.x.min() == 0
    assert dataset.train.x.max() == 1
    assert dataset.shape == shape
    assert dataset.resident
    assert dataset.mean is dataset.std is None
    shares = [np.bincount(y) / len(y) for y in (dataset.train.y, dataset.test.y)]
    np.testing.assert_allclose(*shares, atol=2e-3)


def test_training_and_test_examples_are_disjoint_and_always_the_same():
    first, again = load("digits"), load("digits")
    assert first.sha256 == again.sha256
    for one, other in zip((*first.train, *first.test), (*again.train, *again.test), strict=True):
        np.testing.assert_array_equal(one, other)
    everything = np.concatenate([first.train.x, first.test.x]).reshape(1797, -1)
    from sklearn.datasets import load_digits

    np.testing.assert_array_equal(
        np.sort(everything.sum(1)), np.sort((load_digits().data / 16).astype(np.float32).sum(1))
    )


def test_vectors_are_standardized_by_the_training_examples(archive, arrays):
    dataset = load(f"npz:{archive}")
    np.testing.assert_allclose(dataset.train.x.mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(dataset.train.x.std(0), 1, rtol=1e-5)
    mean, std = arrays["x_train"].mean(0), arrays["x_train"].std(0)
    np.testing.assert_allclose(dataset.test.x, (arrays["x_test"] - mean) / std, rtol=1e-5)


def test_a_constant_feature_and_a_black_image_stay_finite(tmp_path, arrays):
    x_train = arrays["x_train"].copy()
    x_train[:, 2] = 3
    np.savez(tmp_path / "a.npz", **{**arrays, "x_train": x_train})
    assert np.all(load(f"npz:{tmp_path / 'a.npz'}").train.x[:, 2] == 0)
    black = {"x_train": np.zeros((40, 2, 3)), "x_test": np.zeros((13, 2, 3))}
    np.savez(tmp_path / "b.npz", **{**arrays, **black})
    dataset = load(f"npz:{tmp_path / 'b.npz'}")
    assert dataset.train.x.shape == (40, 2, 3, 1)
    assert np.all(dataset.test.x == 0)


def test_images_keep_their_contrast(tmp_path, arrays):
    rng = np.random.default_rng(0)
    x_train, x_test = rng.integers(0, 200, (40, 4, 4, 3)), rng.integers(0, 200, (13, 4, 4, 3))
    np.savez(tmp_path / "rgb.npz", **{**arrays, "x_train": x_train, "x_test": x_test})
    dataset = load(f"npz:{tmp_path / 'rgb.npz'}")
    np.testing.assert_allclose(dataset.train.x, x_train / x_train.max(), rtol=1e-6)
    np.testing.assert_allclose(dataset.test.x, x_test / x_train.max(), rtol=1e-6)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.4, 0.9])
def test_exactly_the_share_of_the_labels_becomes_wrong(rate):
    y = np.random.default_rng(0).integers(0, 10, 1437)
    kept = y.copy()
    noisy = corrupt(y, rate, 10, np.random.default_rng(1))
    assert np.sum(noisy != y) == round(rate * 1437)
    assert noisy.min() >= 0
    assert noisy.max() < 10
    np.testing.assert_array_equal(y, kept)


def test_wrong_labels_are_uniform_over_the_other_classes_and_the_examples():
    y = np.repeat(np.arange(4), 5000)
    noisy = corrupt(y, 0.5, 4, np.random.default_rng(3))
    counts = np.array([np.bincount(noisy[y == c], minlength=4) for c in range(4)])
    wrong = counts[~np.eye(4, dtype=bool)]
    # 10,000 wrong labels in 12 cells: mean 833, standard deviation at most 29.
    np.testing.assert_allclose(wrong, 10_000 / 12, atol=4 * 29)
    # 2,500 expected of each class: standard deviation 31.
    np.testing.assert_allclose(counts.sum(1) - np.diag(counts), 2500, atol=4 * 31)


def test_two_classes_swap():
    y = np.arange(10) % 2
    noisy = corrupt(y, 0.3, 2, np.random.default_rng(0))
    np.testing.assert_array_equal(np.abs(noisy - y).sum(), 3)


@pytest.mark.parametrize("spec", ["mnist", "", "digits.npz", "NPZ:a", "npz:", "hf:"])
def test_an_unknown_name_is_answered_with_the_known_ones(spec):
    with pytest.raises(UserError, match=r"--dataset .*unknown.*digits, mnist5k, npz:PATH, hf:NAME"):
        load(spec)


@pytest.mark.parametrize("option", ["image_column", "label_column", "test_split"])
def test_columns_and_splits_are_for_hugging_face_alone(option):
    flag = option.replace("_", "-")
    with pytest.raises(UserError, match=f"--{flag} x: needs --dataset hf:NAME_OR_PATH, not digits"):
        load("digits", **{option: "x"})


def test_the_digest_is_of_the_contents(arrays, archive, tmp_path):
    def digest(**changed):
        np.savez(tmp_path / "other.npz", **(arrays | changed))
        return load(f"npz:{tmp_path / 'other.npz'}").sha256

    assert digest() == load(f"npz:{archive}").sha256
    x, y = arrays["x_test"].copy(), arrays["y_test"].copy()
    x[-1, -1] = np.nextafter(x[-1, -1], np.inf)
    y[-1] = 1 - y[-1]
    assert len({digest(), digest(x_test=x), digest(y_test=y)}) == 3


def _nan(x):
    x = x.copy()
    x[3, 1] = np.nan
    return x


MALFORMED = {
    "no examples": ({"x_train": np.zeros((0, 6)), "y_train": np.zeros(0, int)}, "x_train.*shape"),
    "one axis": ({"x_train": np.zeros(40)}, r"x_train has shape \(40,\)"),
    "five axes": ({"x_train": np.zeros((40, 1, 1, 1, 1))}, "x_train has shape"),
    "no features": ({"x_train": np.zeros((40, 0)), "x_test": np.zeros((13, 0))}, "x_train.*shape"),
    "NaN": ({"x_train": _nan(np.zeros((40, 6)))}, "x_train has 1 values that are NaN"),
    "infinite": ({"x_test": np.full((13, 6), np.inf)}, "x_test has 78 values"),
    "beyond float32": ({"x_test": np.full((13, 6), 1e39)}, "x_test has 78 values"),
    "complex": ({"x_test": np.zeros((13, 6), complex)}, "x_test has dtype complex128"),
    "text": ({"x_test": np.full((13, 6), "a")}, "x_test has dtype <U1"),
    "float labels": ({"y_train": np.arange(40) % 3 / 1.0}, "y_train has dtype float64.*integer"),
    "text labels": ({"y_test": np.full(13, "a")}, "y_test has dtype.*integer"),
    "too few labels": ({"y_train": np.arange(39) % 3}, r"y_train has shape \(39,\).*\(40,\)"),
    "one-hot labels": ({"y_test": np.eye(13, dtype=int)}, r"y_test has shape \(13, 13\)"),
    "negative label": ({"y_train": np.arange(40) % 3 - 1}, "y_train contains the label -1"),
    "negative test label": ({"y_test": -np.ones(13, int)}, "y_test contains the label -1"),
    "gap": ({"y_train": np.arange(40) % 3 * 2}, "y_train contains the label 2 but not 1"),
    "from one": ({"y_train": np.arange(40) % 3 + 1}, "y_train contains the label 1 but not 0"),
    "one class": (
        {"y_train": np.zeros(40, int), "y_test": np.zeros(13, int)},
        "y_train.*one class",
    ),
    "unknown class": ({"y_test": np.arange(13) % 5}, "y_test contains the label 4.*0 to 2"),
    "other test shape": ({"x_test": np.zeros((13, 5))}, r"x_test.*\(5,\), x_train.*\(6,\)"),
    "objects": ({"x_train": np.array([None] * 40)}, "x_train cannot be read.*numpy.savez"),
}


@pytest.mark.parametrize(("change", "message"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_archives(tmp_path, arrays, change, message):
    path = tmp_path / "data.npz"
    np.savez(path, **{**arrays, **change})
    with pytest.raises(UserError, match=rf"^--dataset npz:.*data\.npz: {message}"):
        load(f"npz:{path}")


def test_missing_arrays_are_named(tmp_path, arrays):
    path = tmp_path / "data.npz"
    np.savez(path, x_train=arrays["x_train"], labels=arrays["y_train"])
    with pytest.raises(UserError, match=r"lacks y_train, x_test, y_test \(it has x_train, labels"):
        load(f"npz:{path}")


def test_missing_files_and_directories(tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.npz: there is no such file"):
        load(f"npz:{tmp_path}/nowhere.npz")
    with pytest.raises(UserError, match="is a directory"):
        load(f"npz:{tmp_path}")


@pytest.mark.parametrize("content", [b"", b"x_train, y_train", b"PK\x03\x04 and then nothing"])
def test_files_of_another_kind(tmp_path, content):
    path = tmp_path / "data.npz"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"not a readable \.npz file.*numpy\.savez"):
        load(f"npz:{path}")


def test_a_single_array_is_no_archive(tmp_path):
    with (tmp_path / "data.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(UserError, match="a single array"):
        load(f"npz:{tmp_path}/data.npz")


def test_damaged_contents(tmp_path, arrays):
    path = tmp_path / "data.npz"
    np.savez_compressed(path, **{**arrays, "x_train": np.random.default_rng(0).random((40, 6))})
    content = bytearray(path.read_bytes())
    content[200:400] = bytes(200)
    path.write_bytes(content)
    with pytest.raises(UserError, match="x_train cannot be read"):
        load(f"npz:{path}")


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float16, np.float64, bool])
def test_any_real_dtype_will_do(tmp_path, arrays, dtype):
    path = tmp_path / "data.npz"
    changed = {"x_train": arrays["x_train"] > 0, "y_train": arrays["y_train"].astype(np.uint8)}
    np.savez(path, **{**arrays, **changed, "x_test": (arrays["x_test"] > 0).astype(dtype)})
    dataset = load(f"npz:{path}")
    mean, std = changed["x_train"].mean(0), changed["x_train"].std(0)
    np.testing.assert_allclose(dataset.test.x, ((arrays["x_test"] > 0) - mean) / std, rtol=1e-5)
    assert {part.y.dtype for part in (dataset.train, dataset.test)} == {np.dtype("int32")}


@pytest.mark.parametrize("name", ["a b", "sales_$2020_$2021", "sweep[rho=0.1]", "\udcff\udcfe"])
def test_any_path_will_do(name, tmp_path, arrays, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    np.savez(tmp_path / f"{name}.npz", **arrays)
    assert load(f"npz:~/{name}.npz").shape == (6,)
    with pytest.raises(UserError, match="there is no such file"):
        load(f"npz:~nobody/{name}.npz")


def test_a_share_of_the_examples_is_the_same_in_every_run():
    whole = load("digits")
    some = whole.some(0.1)
    assert (len(some.train.y), len(some.test.y)) == (144, 36)
    assert some.sha256 == whole.sha256
    for part, all_of_them in ((some.train, whole.train), (some.test, whole.test)):
        places = [np.flatnonzero((all_of_them.x == x).all((1, 2, 3)))[0] for x in part.x]
        np.testing.assert_array_equal(part.y, all_of_them.y[places])
        assert np.all(np.diff(places) > 0)
    np.testing.assert_array_equal(some.train.x, load("digits").some(0.1).train.x)
    assert whole.some(1) is whole
    assert len(whole.some(1e-9).train.y) == 1
