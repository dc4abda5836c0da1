"""Archives of the user's: what is accepted, and what is said about the rest."""

import numpy as np
import pytest

from sam_optax.experiments import npz
from sam_optax.experiments.errors import UserError


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
    "gap": ({"y_train": np.arange(40) % 3 * 2}, "y_train contains the label 2 but no 1"),
    "from one": ({"y_train": np.arange(40) % 3 + 1}, "y_train contains the label 1 but no 0"),
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
        npz.load(str(path))


def test_missing_arrays_are_named(tmp_path, arrays):
    path = tmp_path / "data.npz"
    np.savez(path, x_train=arrays["x_train"], labels=arrays["y_train"])
    with pytest.raises(UserError, match=r"lacks y_train, x_test, y_test \(it has x_train, labels"):
        npz.load(str(path))


def test_missing_files_and_directories(tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.npz: there is no such file"):
        npz.load(str(tmp_path / "nowhere.npz"))
    with pytest.raises(UserError, match="is a directory"):
        npz.load(str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"x_train, y_train", b"PK\x03\x04 and then nothing"])
def test_files_of_another_kind(tmp_path, content):
    path = tmp_path / "data.npz"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"not a readable \.npz file.*numpy\.savez"):
        npz.load(str(path))


def test_a_single_array_is_no_archive(tmp_path):
    with (tmp_path / "data.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(UserError, match="a single array"):
        npz.load(str(tmp_path / "data.npz"))


def test_damaged_contents(tmp_path, arrays):
    path = tmp_path / "data.npz"
    np.savez_compressed(path, **{**arrays, "x_train": np.random.default_rng(0).random((40, 6))})
    content = bytearray(path.read_bytes())
    content[200:400] = bytes(200)
    path.write_bytes(content)
    with pytest.raises(UserError, match="x_train cannot be read"):
        npz.load(str(path))


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float16, np.float64, bool])
def test_any_real_dtype_will_do(tmp_path, arrays, dtype):
    path = tmp_path / "data.npz"
    changed = {"x_train": arrays["x_train"] > 0, "y_train": arrays["y_train"].astype(np.uint8)}
    np.savez(path, **{**arrays, **changed, "x_test": (arrays["x_test"] > 0).astype(dtype)})
    x_train, y_train, x_test, y_test = npz.load(str(path))
    np.testing.assert_array_equal(x_train, changed["x_train"])
    np.testing.assert_array_equal(y_train, arrays["y_train"])
    assert (x_test.dtype, x_test.shape, y_test.shape) == (dtype, (13, 6), (13,))
