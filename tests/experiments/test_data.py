"""Data sets: splits, scaling, label noise, and what is said about malformed arrays."""

import io
import zipfile

import numpy as np
import pytest

from sam_optax.experiments.data.dataset import from_arrays, load
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
    assert (dataset.classes, dataset.shape, dataset.resident) == (10, shape, True)
    assert (dataset.train.x.dtype, dataset.train.y.dtype) == (np.float32, np.int32)
    assert (dataset.train.x.min(), dataset.train.x.max()) == (0, 1)
    assert dataset.mean is dataset.std is None
    assert dataset.described.startswith(f"train {train:,}, test {test:,} examples of ")
    assert "×1 float64 in [0, " in dataset.described
    assert dataset.described.endswith("], 10 classes")
    shares = [np.bincount(y) / len(y) for y in (dataset.train.y, dataset.test.y)]
    np.testing.assert_allclose(*shares, atol=2e-3)


def test_training_and_test_examples_are_disjoint_and_always_the_same():
    """So is the digest, by which runs tell whether their data are the same."""
    first, again = load("digits"), load("digits")
    assert first.sha256 == again.sha256
    assert first.sha256.startswith("d5b8a376")
    for one, other in zip((*first.train, *first.test), (*again.train, *again.test), strict=True):
        np.testing.assert_array_equal(one, other)
    from sklearn.datasets import load_digits

    everything = np.concatenate([first.train.x, first.test.x]).reshape(1797, -1)
    expected = (load_digits().data / 16).astype(np.float32)
    np.testing.assert_array_equal(np.sort(everything.sum(1)), np.sort(expected.sum(1)))


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


@pytest.mark.parametrize(("rate", "classes"), [(0.0, 10), (0.4, 10), (0.9, 10), (0.3, 2)])
def test_exactly_the_share_of_the_labels_becomes_wrong(rate, classes):
    y = np.random.default_rng(0).integers(0, classes, 1437)
    kept = y.copy()
    noisy = corrupt(y, rate, classes, np.random.default_rng(1))
    assert np.sum(noisy != y) == round(rate * 1437)
    assert set(noisy) <= set(range(classes))
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


@pytest.mark.parametrize("spec", ["mnist", "", "NPZ:a", "npz:", "hf:"])
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


def _images(*shape, n=40):
    return np.random.default_rng(n).random((n, *shape))


def _both(*shape):
    return {"x_train": _images(*shape), "x_test": _images(*shape, n=13)}


MALFORMED = {
    "no examples": ({"x_train": np.zeros((0, 6)), "y_train": np.zeros(0, int)}, "x_train.*shape"),
    "one axis": ({"x_train": np.zeros(40)}, r"x_train has shape \(40,\)"),
    "swapped": ({"x_test": np.arange(13), "y_test": np.zeros((13, 6))}, "x_test .*other array"),
    "five axes": (_both(1, 1, 1, 1), "x_train has shape"),
    "channels first": (_both(3, 32, 32), r"x_train has shape \(40, 3, 32, 32\); .*moveaxis"),
    "NaN": (
        {"x_train": np.where(np.arange(240) == 9, np.nan, 0).reshape(40, 6)},
        "x_train has 1 v",
    ),
    "beyond float32": ({"x_test": np.full((13, 6), 1e39)}, "x_test has 78 values"),
    "complex": ({"x_test": np.zeros((13, 6), complex)}, "x_test has dtype complex128"),
    "text": ({"x_test": np.full((13, 6), "a")}, "x_test has dtype <U1"),
    "scales": (
        {"x_train": np.full((40, 6), 255, np.uint8), "x_test": np.full((13, 6), 0.5)},
        r"x_train lies in \[255, 255\] but x_test lies in \[0.5, 0.5\]; scale both alike",
    ),
    "float labels": ({"y_train": np.arange(40) % 3 / 1.0}, "y_train has dtype float64.*integer"),
    "too few labels": ({"y_train": np.arange(39) % 3}, r"y_train has shape \(39,\).*\(40,\)"),
    "one-hot labels": ({"y_test": np.eye(13, dtype=int)}, r"y_test has shape \(13, 13\).*argmax"),
    "negative label": ({"y_train": np.arange(40) % 3 - 1}, "y_train contains the label -1"),
    "gap": ({"y_train": np.arange(40) % 3 * 2}, "y_train contains the label 2 but not 1"),
    "one class": ({"y_train": np.zeros(40, int)}, "y_train.*one class"),
    "unknown class": ({"y_test": np.arange(13) % 5}, "y_test contains the label 4.*0 to 2"),
    "other test shape": ({"x_test": np.zeros((13, 5))}, r"the shapes are .*\(40, 6\).*\(13, 5\)"),
    "objects": ({"x_train": np.array([None] * 40)}, "x_train cannot be read.*numpy.savez"),
}


@pytest.mark.parametrize(("change", "message"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_archives(tmp_path, arrays, change, message):
    path = tmp_path / "data.npz"
    np.savez(path, **{**arrays, **change})
    with pytest.raises(UserError, match=rf"^--dataset npz:.*data\.npz: {message}"):
        load(f"npz:{path}")


def zipped(*members):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members:
            archive.writestr(name, content)
    return file.getvalue()


def member(shape, content=b""):
    file = io.BytesIO()
    header = {"descr": "<f8", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue() + content


def damaged():
    file = io.BytesIO()
    np.savez_compressed(file, **dict.fromkeys(KEYS, _images(6)))
    content = bytearray(file.getvalue())
    content[200:400] = bytes(200)
    return content


KEYS = ("x_train", "y_train", "x_test", "y_test")
FILES = {
    "nothing": (b"", r"not a readable \.npz file \(no data left in file\); write it with numpy"),
    "cut off": (b"PK\x03\x04 and then nothing", r"not a readable \.npz file"),
    "a single array": (member((1,), bytes(8)), r"not a readable \.npz file"),
    "no arrays": (zipped(("x_train.txt", "1")), r"x_train cannot .*\(the file has x_train.txt\)"),
    "bytes": (zipped(("x_train", b"1")), r"x_train cannot be read \(not an array\)"),
    "damaged": (damaged(), "x_train cannot be read"),
    "huge": (zipped(("x_train.npy", member((2**42, 6)))), r"it does not fit into memory \(.* TiB"),
}


@pytest.mark.parametrize(("content", "message"), FILES.values(), ids=FILES)
def test_files_that_are_not_such_archives(tmp_path, content, message):
    path = tmp_path / "data.npz"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"^--dataset npz:.*data\.npz: {message}"):
        load(f"npz:{path}")


def test_of_two_members_of_one_name_none_is_taken(tmp_path, archive):
    path = tmp_path / "data.npz"
    path.write_bytes(archive.read_bytes())
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(path, "a") as file:
        file.writestr("x_train.npy", member((1,), bytes(8)))
    with pytest.raises(UserError, match=r"x_train cannot be read .*y_test, x_train"):
        load(f"npz:{path}")


INPUTS = {
    "vectors": ((6,), float, np.float32, "6 float64 in [0, 7]"),
    "images": ((5, 4, 3), np.uint8, np.float32, "5×4×3 uint8 in [0, 7]"),
    "sequences": ((9, 2), np.float16, np.float32, "9×2 float16 in [0, 7]"),
    "tokens": ((9,), np.uint16, np.int32, "9 uint16 in [0, 7]"),
}


@pytest.mark.parametrize(("shape", "given", "used", "content"), INPUTS.values(), ids=INPUTS)
def test_arrays_are_taken_as_they_are(shape, given, used, content):
    x = np.arange(12 * np.prod(shape)).reshape(12, *shape).astype(int) % 8
    y = np.arange(12) % 3
    dataset = from_arrays(train=(x.astype(given), y), test=(x[:6].astype(given), y[:6]))
    np.testing.assert_array_equal(dataset.train.x, x)
    np.testing.assert_array_equal(dataset.test.y, y[:6])
    assert (dataset.train.x.dtype, dataset.dtype, dataset.train.y.dtype) == (used, used, np.int32)
    assert (dataset.shape, dataset.classes) == (shape, 3)
    assert dataset.described == f"train 12, test 6 examples of {content}, 3 classes"


def test_without_test_arrays_a_fifth_is_held_out():
    x, y = np.arange(40.0).reshape(20, 2), np.arange(20) % 2
    dataset = from_arrays(train=(x, y))
    assert sorted([*dataset.train.x[:, 0], *dataset.test.x[:, 0]]) == [*range(0, 40, 2)]
    assert np.bincount(dataset.test.y).tolist() == [2, 2]
    for labels, options in ((x, {"classification": False}), (np.arange(20) // 19, {})):
        other = from_arrays(train=(x, labels), **options)  # no class by class
        assert (len(other.train.y), len(other.test.y)) == (16, 4)
    with pytest.raises(UserError, match="it has one example and no test examples"):
        from_arrays(train=(x[:1], x[:1]), classification=False)


@pytest.mark.parametrize("outputs", [(), (2,)])
def test_targets_of_a_regression(outputs):
    x, y = _images(6), _images(*outputs)
    dataset = from_arrays(train=(x, y), test=(x, y), classification=False)
    np.testing.assert_array_equal(dataset.train.y, y.astype(np.float32))
    assert (dataset.classes, dataset.classification) == (y[0].size, False)


_X, _Y = _images(6), np.arange(40) % 3
WRONG = {
    "no pair": ({"train": _X}, r"train is of type ndarray; pass a pair \(x, y\)"),
    "floats": ({"test": (_X, _Y / 1)}, "y of test has dtype float64; use integer class labels"),
    "one axis": ({"train": (_Y, _Y)}, r"x of train has shape \(40,\); use"),
    "other kinds": (
        {"test": (_X.astype(int), _Y)},
        "x of train is float64, x of test int64; pass both as integers below",
    ),
    "NaN target": (
        {"train": (_X, np.full(40, np.nan)), "classification": False},
        "y of train has 40 values that are NaN or not finite",
    ),
    "targets": (
        {"train": (_X, _X), "classification": False},
        r"the shapes are .*y of train \(40, 6\).* y of test \(40,\)",
    ),
}


@pytest.mark.parametrize(("given", "message"), WRONG.values(), ids=WRONG)
def test_arrays_that_cannot_be_trained_on(given, message):
    with pytest.raises(UserError, match=f"^{message}"):
        from_arrays(**{"train": (_X, _Y), "test": (_X, _Y), **given})


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
    with pytest.raises(UserError, match="no such file"):
        load(f"npz:~nobody/{name}.npz")
    with pytest.raises(UserError, match="is a directory"):
        load("npz:~")
