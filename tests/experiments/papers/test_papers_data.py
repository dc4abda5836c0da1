"""Data sets in their published formats, and what is said about those that are not."""

import pickle

import archives
import numpy as np
import pytest

from sam_optax.experiments.errors import UserError
from sam_optax.experiments.papers import datasets

VERSIONS = {"binary": archives.binary, "python": archives.python}
PACKINGS = {"folder": archives.to_folder, "tar": archives.to_tar}


@pytest.mark.parametrize("classes", [10, 100])
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("version", VERSIONS)
def test_cifar(version, packing, classes, tmp_path):
    path = PACKINGS[packing](VERSIONS[version](classes), tmp_path, "cifar")
    dataset = datasets.load(f"cifar{classes}:{path}", 32)
    *train, test = archives.arrays(classes).values()
    x_train, y_train = (np.concatenate([file[i] for file in train]) for i in range(2))
    for images, (x, y) in [(dataset.train, (x_train, y_train)), (dataset.test, test)]:
        found_x, found_y = images.batch(np.arange(len(images)), None)
        np.testing.assert_array_equal(found_x, x)
        np.testing.assert_array_equal(found_y, y)
    assert (dataset.classes, dataset.size) == (classes, 32)
    np.testing.assert_allclose(dataset.mean, (x_train / 255).mean((0, 1, 2)))
    np.testing.assert_allclose(dataset.std, (x_train / 255).std((0, 1, 2)))


def test_the_digest_is_of_the_examples(tmp_path):
    one = archives.to_folder(archives.binary(10), tmp_path, "one")
    two = archives.to_tar(archives.python(10), tmp_path, "two")
    changed = archives.binary(10)
    changed["test_batch.bin"] = changed["test_batch.bin"][:-1] + b"\0"
    three = archives.to_folder(changed, tmp_path, "three")
    digests = [datasets.load(f"cifar10:{path}", 32).sha256 for path in (one, two, three)]
    assert digests[0] == digests[1] != digests[2]


class Evil:
    """Would write a file if it were unpickled by the usual means."""

    def __reduce__(self):
        return (open, ("evil", "w"))


def broken(name):
    contents = archives.python(10) if "pickle" in name else archives.binary(10)
    match name:
        case "a file is missing":
            del contents["data_batch_3.bin"]
        case "no multiple of a record":
            contents["data_batch_2.bin"] += b"\0"
        case "label out of range":
            contents["test_batch.bin"] = b"\x0a" + contents["test_batch.bin"][1:]
        case "no examples":
            contents["test_batch.bin"] = b""
        case "pickle runs code":
            contents["data_batch_1"] = pickle.dumps(Evil())
        case "pickle cut off":
            contents["data_batch_1"] = contents["data_batch_1"][:100]
        case "pickle of a list":
            contents["data_batch_1"] = pickle.dumps([1])
        case "pickle of other shape":
            pixels = np.zeros((2, 7), np.uint8)
            contents["data_batch_1"] = archives.python2({"data": pixels, "labels": [0, 1]})
        case "pickle of fractions":
            pixels = np.zeros((2, 3072), np.uint8)
            contents["data_batch_1"] = archives.python2({"data": pixels, "labels": [0.5, 1.0]})
        case "pickle of columns":
            pixels = np.zeros((2, 3072), np.uint8)
            contents["data_batch_1"] = archives.python2({"data": pixels, "labels": [[0], [1]]})
    return contents


BROKEN = {
    "a file is missing": r"data_batch_3.bin missing; give the published archive of CIFAR-10",
    "no multiple of a record": r"data_batch_2.bin is malformed \(12293 bytes, not a multiple",
    "label out of range": r"test_batch.bin has no examples, or labels outside 0 … 9",
    "no examples": r"test_batch.bin has no examples",
    "pickle runs code": r"data_batch_1 is malformed \(it contains .*open, which is no array",
    "pickle cut off": r"data_batch_1 is malformed",
    "pickle of a list": r"data_batch_1 is malformed \(not a dictionary\)",
    "pickle of other shape": r"data must be uint8 of shape \(2, 3072\)",
    "pickle of fractions": r"data_batch_1 is malformed \(labels must be a list of integers\)",
    "pickle of columns": r"data_batch_1 is malformed \(labels must be a list of integers\)",
}


@pytest.mark.parametrize(("name", "message"), BROKEN.items(), ids=BROKEN)
def test_a_malformed_archive(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = archives.to_folder(broken(name), tmp_path, "cifar")
    with pytest.raises(UserError, match=message):
        datasets.load(f"cifar10:{path}", 32)
    assert not (tmp_path / "evil").exists()


def test_no_archive(tmp_path):
    with pytest.raises(UserError, match=r"--dataset cifar10:.*no such file; download"):
        datasets.load(f"cifar10:{tmp_path / 'nowhere'}", 32)
    (tmp_path / "text").write_text("hello")
    with pytest.raises(UserError, match="cannot be read"):
        datasets.load(f"cifar10:{tmp_path / 'text'}", 32)


@pytest.mark.parametrize("spec", ["cifar", "cifar10", "npz:x", "tfds:"])
def test_unknown_data_set(spec):
    with pytest.raises(UserError, match=f"--dataset {spec}: unknown data set.*cifar10:PATH"):
        datasets.load(spec, 32)


def test_digits():
    dataset = datasets.load("digits", 32)
    images, _ = dataset.train.batch(np.arange(3), None)
    assert images.shape == (3, 8, 8, 3)
    assert len(dataset.train) == 1437
    assert images.dtype == np.uint8
