"""Folders as TFDS leaves them, read without TensorFlow."""

import archives
import numpy as np
import pytest

from sam_optax.experiments.errors import UserError
from sam_optax.experiments.papers import datasets, example, records


def test_the_checksum_is_that_of_the_format():
    # CRC-32C of "123456789" is E3069283 (RFC 3720's check value); masked as TFRecord says.
    crc = 0xE3069283
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    assert records.masked_crc(b"123456789") == masked


def test_records_are_found_again(tmp_path):
    contents = [b"", b"a", b"long" * 100]
    records.write(tmp_path / "file", contents)
    places = records.index(tmp_path / "file")
    assert [records.read(tmp_path / "file", *place) for place in places] == contents


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b"\1" + b[1:], lambda b: b + b"x"])
def test_a_damaged_file(damage, tmp_path):
    path = tmp_path / "file"
    records.write(path, [b"some", b"more"])
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match="is damaged or cut off at record"):
        records.index(path)


def test_example_messages():
    message = archives.tf_example({"image": b"\0\1", "label": 300, "id": b"name"})
    assert example.parse(message) == {"image": b"\0\1", "label": 300, "id": b"name"}
    with pytest.raises(ValueError, match="cut off"):
        example.parse(message[:-1])


def small(rng, n, size=8):
    return list(rng.integers(0, 256, (n, size, size, 3), np.uint8)), rng.integers(0, 5, n)


def test_small_images_are_kept_in_memory(tmp_path):
    rng = np.random.default_rng(0)
    splits = {"train": small(rng, 7), "test": small(rng, 4)}
    path = archives.tfds(tmp_path / "some" / "1.0.0", splits, 5, (8, 8, 3))
    dataset = datasets.load(f"tfds:{path}", 32)
    assert (dataset.classes, dataset.size) == (5, 8)
    for images, (x, y) in zip((dataset.train, dataset.test), splits.values(), strict=True):
        assert len(images) == len(y)
        found_x, found_y = images.batch(np.array([2, 0]), (0,))
        np.testing.assert_array_equal(found_x, np.stack(x)[[2, 0]])
        np.testing.assert_array_equal(found_y, y[[2, 0]])


@pytest.fixture
def varying(tmp_path):
    """Photographs of different sizes, as ImageNet's: a ramp from left to right, brighter each."""
    rng = np.random.default_rng(0)

    def photo(i):
        height, width = rng.integers(20, 40, 2)
        ramp = np.linspace(10 * i, 10 * i + 100, width).astype(np.uint8)
        return np.broadcast_to(ramp[None, :, None], (height, width, 3)).copy()

    splits = {
        "train": ([photo(i) for i in range(6)], np.arange(6) % 3),
        "validation": ([photo(i) for i in range(3)], np.arange(3)),
        "test": ([photo(0)], [-1]),  # ImageNet's have no labels
    }
    path = archives.tfds(tmp_path / "imagenet2012" / "5.1.0", splits, 3, kind="JPEG")
    return datasets.load(f"tfds:{path}", 16), splits


def test_photographs_are_cropped_and_resized(varying):
    dataset, splits = varying
    assert (dataset.size, dataset.classes, len(dataset.test)) == (16, 3, 3)
    images, labels = dataset.test.batch(np.arange(3), None)
    np.testing.assert_array_equal(labels, np.arange(3))
    assert images.shape == (3, 16, 16, 3)
    for image, photo in zip(images, splits["validation"][0], strict=True):
        assert abs(image.mean() - photo.mean()) < 6  # the middle of a ramp
        side = 0.875 * min(photo.shape[:2])
        slope = 100 / (photo.shape[1] - 1)
        rise = float(image[:, -1].mean()) - float(image[:, 0].mean())
        np.testing.assert_allclose(rise, slope * side * 15 / 16, atol=6)


def test_random_crops_are_those_of_their_seed(varying):
    dataset, _ = varying
    some = np.array([4, 1])
    first, _ = dataset.train.batch(some, (0, 1))
    np.testing.assert_array_equal(first, dataset.train.batch(some, (0, 1))[0])
    assert np.any(first != dataset.train.batch(some, (0, 2))[0])
    # An image's crop does not depend on what else is in the batch.
    np.testing.assert_array_equal(first[1:], dataset.train.batch(some[1:], (0, 1))[0])


def test_no_folder_of_tfds(tmp_path):
    with pytest.raises(UserError, match=r"there is no features.json; give the folder"):
        datasets.load(f"tfds:{tmp_path}", 32)
    (tmp_path / "features.json").write_text('{"featuresDict": {"features": {"text": {}}}}')
    with pytest.raises(UserError, match="has no image and class label"):
        datasets.load(f"tfds:{tmp_path}", 32)


def test_a_folder_without_a_split(tmp_path):
    path = archives.tfds(tmp_path / "x", {"train": small(np.random.default_rng(0), 3)}, 5)
    with pytest.raises(UserError, match="no files of the split test"):
        datasets.load(f"tfds:{path}", 32)


def test_a_folder_that_is_not_complete(tmp_path):
    """Half of a data set would train without a word."""
    splits = {name: small(np.random.default_rng(0), 4) for name in ("train", "test")}
    path = archives.tfds(tmp_path / "x", splits, 5, (8, 8, 3))
    missing = path / "some-test.tfrecord-00001-of-00002"
    for leave in (lambda: missing.write_bytes(b""), missing.unlink):  # as a full disk does
        leave()
        with pytest.raises(UserError, match=f"{missing.name} is missing or empty; prepare the"):
            datasets.load(f"tfds:{path}", 32)
    missing.mkdir()
    with pytest.raises(UserError, match=f"{missing.name} cannot be read"):
        datasets.load(f"tfds:{path}", 32)


def test_features_of_another_shape(tmp_path):
    path = archives.tfds(tmp_path / "x", {"train": small(np.random.default_rng(0), 2)}, 5, (8, 8))
    features = path / "features.json"
    features.write_text(features.read_text().replace('"8"', '"eight"'))
    with pytest.raises(UserError, match="has no image and class label"):
        datasets.load(f"tfds:{path}", 32)


def test_a_record_without_a_label(tmp_path):
    splits = {name: small(np.random.default_rng(0), 2) for name in ("train", "test")}
    path = archives.tfds(tmp_path / "x", splits, 5, shards=1)
    records.write(path / "some-train.tfrecord-00000-of-00001", [archives.tf_example({"a": 1})] * 2)
    with pytest.raises(UserError, match=r"record 0 \(some-train.* has no image and label"):
        datasets.load(f"tfds:{path}", 32).train.batch(np.array([0]), None)


def test_a_label_out_of_range(tmp_path):
    images, labels = small(np.random.default_rng(0), 2)
    splits = {"train": (images, labels), "test": (images, [-1, 0])}
    path = archives.tfds(tmp_path / "x", splits, 5, (8, 8, 3))
    with pytest.raises(UserError, match=r"record 0 .* has the label -1, outside 0 … 4"):
        datasets.load(f"tfds:{path}", 32)


def test_a_file_that_ends_early_between_two_records(tmp_path):
    """The format of the file cannot tell; ``dataset_info.json`` says how many there should be."""
    splits = {name: small(np.random.default_rng(0), 8) for name in ("train", "test")}
    path = archives.tfds(tmp_path / "some" / "1.0.0", splits, 5, (8, 8, 3))
    file = sorted(path.glob("*-train.*"))[1]
    kept = [records.read(file, *place) for place in records.index(file)[:3]]
    records.write(file, kept)
    with pytest.raises(UserError, match=f"{file.name} has 3 of 4 records; prepare the data set"):
        datasets.load(f"tfds:{path}", 32)
    (path / "dataset_info.json").unlink()  # folders without it are taken as they are
    assert len(datasets.load(f"tfds:{path}", 32).train) == 7
