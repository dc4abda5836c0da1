"""Tiny archives in the formats in which CIFAR is published, and a folder as TFDS leaves it."""

import io
import json
import pickle
import struct
import tarfile
from typing import ClassVar

import numpy as np
from PIL import Image

from sam_optax.experiments.papers import records

PER_FILE = 4


def arrays(classes, seed=0):
    """Images (examples, 32, 32, 3) and labels by file: train files in order, then the test file."""
    rng = np.random.default_rng(seed)
    files = [f"data_batch_{i}" for i in range(1, 6)] if classes == 10 else ["train"]
    names = [*files, "test_batch" if classes == 10 else "test"]
    return {
        name: (
            rng.integers(0, 256, (PER_FILE, 32, 32, 3), np.uint8),
            rng.integers(0, classes, PER_FILE),
        )
        for name in names
    }


def binary(classes):
    """The binary version: contents by name of the file."""
    contents = {}
    for name, (images, labels) in arrays(classes).items():
        fine = labels[:, None].astype(np.uint8)
        front = fine if classes == 10 else np.hstack([fine // 5, fine])
        planes = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
        contents[f"{name}.bin"] = np.hstack([front, planes]).tobytes()
    names = "batches.meta.txt" if classes == 10 else "fine_label_names.txt"
    return {**contents, names: b"airplane\n"}


class _Python2Pickler(pickle._Pickler):
    """Strings as Python 2's, and NumPy's functions by their names of then: as published."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_string(self, obj):
        data = obj if isinstance(obj, bytes) else obj.encode("latin1")
        self.write(pickle.BINSTRING + struct.pack("<i", len(data)) + data)
        self.memoize(obj)

    def save_global(self, obj, name=None):
        module = {"_reconstruct": "numpy.core.multiarray"}.get(obj.__name__, "numpy")
        self.write(pickle.GLOBAL + f"{module}\n{obj.__name__}\n".encode())
        self.memoize(obj)

    dispatch[bytes] = dispatch[str] = save_string
    dispatch[type] = dispatch[type(np.zeros(1).__reduce__()[0])] = save_global


def python2(content):
    """A pickle of Python 2."""
    file = io.BytesIO()
    _Python2Pickler(file, protocol=2).dump(content)
    return file.getvalue()


def python(classes):
    """The Python version: contents by name of the file."""
    contents = {}
    for name, (images, labels) in arrays(classes).items():
        found = {
            "batch_label": "one of them",
            "data": images.transpose(0, 3, 1, 2).reshape(len(images), -1),
            "labels" if classes == 10 else "fine_labels": labels.tolist(),
            "filenames": [f"{i}.png" for i in range(len(labels))],
        }
        if classes == 100:
            found["coarse_labels"] = (labels // 5).tolist()
        contents[name] = python2(found)
    return {**contents, "batches.meta": python2({"label_names": ["airplane"]})}


def to_folder(contents, path, folder):
    """Writes files as unpacking the archive would."""
    (path / folder).mkdir()
    for name, content in contents.items():
        (path / folder / name).write_bytes(content)
    return path / folder


def to_tar(contents, path, folder):
    """Writes the archive."""
    with tarfile.open(path / f"{folder}.tar.gz", "w:gz") as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path / f"{folder}.tar.gz"


def _varint(n):
    out, n = b"", n % 2**64
    while n >= 0x80:
        out, n = out + bytes([n & 0x7F | 0x80]), n >> 7
    return out + bytes([n])


def _field(number, content):
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def tf_example(features):
    """A ``tf.train.Example`` of bytes and integers."""
    entries = b""
    for name, value in features.items():
        if isinstance(value, int):
            feature = _field(3, _field(1, _varint(value)))
        else:
            feature = _field(1, _field(1, value))
        entries += _field(1, _field(1, name.encode()) + _field(2, feature))
    return _field(1, entries)


def encoded(image, kind):
    """An image as PNG or JPEG."""
    file = io.BytesIO()
    Image.fromarray(image).save(file, kind)
    return file.getvalue()


def tfds(path, splits, classes, shape=(None, None, 3), kind="PNG", shards=2):
    """A folder as TFDS prepares it.

    Args:
      path: the folder, to be created.
      splits: name -> (list of images, labels).
      classes: number of classes.
      shape: as in the features, ``None`` where it varies.
      kind: encoding of the images.
      shards: files of each split.
    """
    path.mkdir(parents=True)
    dimensions = [str(side) if side else "-1" for side in shape]
    package = "tensorflow_datasets.core.features"
    features = {
        "image": {
            "pythonClassName": f"{package}.image_feature.Image",
            "image": {
                "shape": {"dimensions": dimensions},
                "dtype": "uint8",
                "encodingFormat": kind.lower(),
            },
        },
        "label": {
            "pythonClassName": f"{package}.class_label_feature.ClassLabel",
            "classLabel": {"numClasses": str(classes)},
        },
        "id": {"pythonClassName": f"{package}.text_feature.Text", "text": {}},
    }
    whole = {
        "pythonClassName": f"{package}.features_dict.FeaturesDict",
        "featuresDict": {"features": features},
    }
    (path / "features.json").write_text(json.dumps(whole))
    info = {"name": "some", "splits": []}
    for split, (images, labels) in splits.items():
        examples = [
            tf_example({"id": b"x", "image": encoded(i, kind), "label": int(y)})
            for i, y in zip(images, labels, strict=True)
        ]
        per_shard = -(-len(examples) // shards)
        parts = [examples[i * per_shard : (i + 1) * per_shard] for i in range(shards)]
        for shard, part in enumerate(parts):
            name = f"some-{split}.tfrecord-{shard:05d}-of-{shards:05d}"
            records.write(path / name, part)
        info["splits"].append({"name": split, "shardLengths": [str(len(part)) for part in parts]})
    (path / "dataset_info.json").write_text(json.dumps(info))
    return path
