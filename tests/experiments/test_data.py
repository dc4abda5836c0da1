"""Data sets: splits, scaling, label noise, and what is said about malformed arrays."""

import io
import zipfile

import numpy as np
import pytest

from sam_optax.experiments.data.dataset import from_arrays, load
from sam_optax.experiments.data.examples import corrupt
from sam_optax.experiments.errors import UserError


@pytest.mark.parametrize(
    ("name", "train", "test", "shape"),
    [
        ("digits", 1437, 360, (8, 8, 1)),
        pytest.param("mnist5k", 4000, 1000, (28, 28, 1), marks=pytest.mark.slow),
    ],
)
def test_built_in_data_are_split_class_by_class(name, train, test, shape):
    dataset = load(name)
    assert dataset.train.x.shape == (train, *shape)
    assert dataset.test.x.shape == (test, *shape)
    assert (dataset.classes, dataset.shape) == (10, shape)
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


def test_vectors_are_standardized_by_the_training_examples(archive, arrays, tmp_path):
    """A constant feature is 0, and labels may be of any integers."""
    changed = {**arrays, "x_train": arrays["x_train"].copy()}
    changed["x_train"][:, 2] = 3
    changed["y_train"] = arrays["y_train"].astype(np.uint8)
    np.savez(tmp_path / "a.npz", **changed)
    dataset = load(f"npz:{tmp_path / 'a.npz'}")
    mean, std = changed["x_train"].mean(0), changed["x_train"].std(0)
    std[2] = 1
    for part in ("train", "test"):
        x, y = getattr(dataset, part)
        np.testing.assert_allclose(x, (changed[f"x_{part}"] - mean) / std, rtol=1e-5, atol=1e-6)
        assert (x.dtype, y.dtype) == (np.float32, np.int32)


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, bool])
@pytest.mark.parametrize("top", [200, 0])
def test_images_of_any_dtype_keep_their_contrast(tmp_path, arrays, dtype, top):
    """One range for both parts; images that are black stay so."""
    rng = np.random.default_rng(0)
    x = [rng.integers(0, top + 1, (n, 4, 5)).astype(dtype) for n in (40, 13)]
    np.savez(tmp_path / "a.npz", **{**arrays, "x_train": x[0], "x_test": x[1]})
    dataset = load(f"npz:{tmp_path / 'a.npz'}")
    scale = max(x[0].max(), 1)
    np.testing.assert_allclose(dataset.train.x[..., 0], x[0].astype(float) / scale, rtol=1e-6)
    np.testing.assert_allclose(dataset.test.x[..., 0], x[1].astype(float) / scale, rtol=1e-6)


@pytest.mark.parametrize(("rate", "classes"), [(0.0, 4), (0.9, 4), (0.5, 4), (0.3, 2)])
def test_exactly_the_share_of_the_labels_becomes_wrong_uniformly(rate, classes):
    y = np.arange(20_000) % classes
    kept = y.copy()
    noisy = corrupt(y, rate, classes, np.random.default_rng(1))
    np.testing.assert_array_equal(y, kept)
    counts = np.array([np.bincount(noisy[y == c], minlength=classes) for c in range(classes)])
    wrong = counts[~np.eye(classes, dtype=bool)]
    expected = rate * len(y)
    assert wrong.sum() == expected
    deviation = np.sqrt(expected / wrong.size)
    np.testing.assert_allclose(wrong, expected / wrong.size, atol=4 * deviation)


NAMES = r"unknown data set; use one of digits, mnist5k, npz:PATH, hf:NAME_OR_PATH"
SPECS = [
    *[(spec, f"--dataset {spec}: {NAMES}") for spec in ("mnist", "", "NPZ:a", "npz:", "hf:")],
    ("npz:~nobody/a", "no such file"),
    ("npz:~", "is a directory"),
]


@pytest.mark.parametrize(("spec", "message"), SPECS)
def test_names_that_do_not_suit(spec, message):
    with pytest.raises(UserError, match=message):
        load(spec)


def _images(*shape, n=40):
    return np.random.default_rng(n).random((n, *shape))


MALFORMED = {
    "swapped": ({"x_test": np.arange(13), "y_test": np.zeros((13, 6))}, "x_test .*other array"),
    "channels first": (
        {"x_train": _images(3, 32, 32), "x_test": _images(3, 32, 32, n=13)},
        r"x_train has shape \(40, 3, 32, 32\); .*moveaxis",
    ),
    "NaN": (
        {"x_train": np.where(np.arange(240) == 9, np.nan, 0).reshape(40, 6)},
        "x_train has 1 v",
    ),
    "beyond float32": ({"x_test": np.full((13, 6), 1e39)}, "x_test has 78 values"),
    "complex": ({"x_test": np.zeros((13, 6), complex)}, "x_test has dtype complex128"),
    "scales": (
        {"x_train": np.full((40, 6), 255, np.uint8), "x_test": np.full((13, 6), 0.5)},
        r"x_train lies in \[255, 255\] but x_test lies in \[0.5, 0.5\]; scale both alike",
    ),
    "float labels": ({"y_train": np.arange(40) % 3 / 1.0}, "y_train has dtype float64.*integer"),
    "one-hot labels": ({"y_test": np.eye(13, dtype=int)}, r"y_test has shape \(13, 13\).*argmax"),
    "negative label": ({"y_train": np.arange(40) % 3 - 1}, "y_train contains the label -1"),
    "gap": ({"y_train": np.arange(40) % 3 * 2}, "y_train contains the label 2 in the place of 1"),
    "one class": ({"y_train": np.zeros(40, int)}, "y_train.*one class"),
    "unknown class": ({"y_test": np.arange(13) % 5}, "y_test contains the label 4.*0 to 2"),
    "other test shape": ({"x_test": np.zeros((13, 5))}, r"the shapes are .*\(40, 6\).*\(13, 5\)"),
    "objects": ({"x_train": np.array([None] * 40)}, "x_train cannot be read.*numpy.savez"),
}


def zipped(*members):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members:
            archive.writestr(name, content)
    return file.getvalue()


def member(shape):
    """An array without content."""
    file = io.BytesIO()
    header = {"descr": "<f8", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue()


def damaged():
    file = io.BytesIO()
    np.savez_compressed(file, **dict.fromkeys(KEYS, _images(6)))
    content = bytearray(file.getvalue())
    content[200:400] = bytes(200)
    return content


TWICE = zipped(("x_train.npy", b"1"), ("y_train.npy", b"1")).replace(b"y_train", b"x_train")
KEYS = ("x_train", "y_train", "x_test", "y_test")
FILES = {
    "nothing": (b"", r"not a readable \.npz file \(no data left in file\); write it with numpy"),
    "no arrays": (zipped(("x_train.txt", "1")), r"x_train cannot .*\(the file has x_train.txt\)"),
    "twice": (TWICE, r"x_train cannot be read \(the file has x_train, x_train\)"),
    "bytes": (zipped(("x_train", b"1")), r"x_train cannot be read \(not an array\)"),
    "damaged": (damaged(), "x_train cannot be read"),
    "huge": (
        zipped(("x_train.npy", member((2**42, 6)))),
        r"x_train cannot be read \(unable to allocate .*\); use fewer ex",
    ),
}


@pytest.mark.parametrize(
    ("wrong", "message"), [*MALFORMED.values(), *FILES.values()], ids=[*MALFORMED, *FILES]
)
def test_archives_that_cannot_be_trained_on(tmp_path, arrays, wrong, message):
    path = tmp_path / "data.npz"
    if isinstance(wrong, dict):
        np.savez(path, **{**arrays, **wrong})
    else:
        path.write_bytes(wrong)
    with pytest.raises(UserError, match=rf"^--dataset npz:.*data\.npz: {message}"):
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
    rare = from_arrays(train=(x, np.arange(20) // 19))  # cannot be class by class
    assert (len(rare.train.y), len(rare.test.y)) == (16, 4)


@pytest.mark.parametrize("outputs", [(), (2,)])
def test_targets_of_a_regression(outputs):
    x, y = _images(6), _images(*outputs)
    dataset = from_arrays(train=(x, y), classification=False)
    held = sorted([*dataset.train.y.ravel(), *dataset.test.y.ravel()])
    assert held == sorted(y.astype(np.float32).ravel())
    assert dataset.described.endswith(f", {y[0].size} output{'s' * bool(outputs)}")


_X, _Y = _images(6), np.arange(40) % 3
WRONG = {
    "no pair": ({"train": _X}, r"train is of type ndarray; pass a pair \(x, y\)"),
    "other kinds": (
        {"test": (_X.astype(int), _Y)},
        "x of train is float64, x of test int64; pass both as integers below",
    ),
    "NaN target": (
        {"train": (_X, np.full(40, np.nan)), "classification": False},
        "y of train has 40 values that are NaN or infinite",
    ),
    "one example": (
        {"train": (_X[:1], _X[:1]), "test": None, "classification": False},
        ".*it has one example and no test examples",
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
