"""The checkpoint file: complete and of this very run, or refused with the reason."""

import copy
import hashlib
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from sam_optax.experiments import checkpoint_file, results
from sam_optax.experiments.checkpoints import Checkpoints
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.output import OutputDirectory
from sam_optax.experiments.snapshots import Snapshot

IDENTITY = {
    "settings": {"dataset": "digits", "epochs": 9, "methods": ["fsam"], "label_noise": 0.1},
    "hyperparameters": {"fsam": {"rho": 0.5}},
    "data": "0123",
}


def arrays(params=(2, 300), state=()):
    return {"fsam": {"params": np.ones(params, np.float32), "state": (np.asarray(1), {}, *state)}}


def snapshot(epoch):
    tree = arrays()
    tree["fsam"]["params"] = np.random.default_rng(epoch).normal(size=(2, 300)).astype(np.float32)
    record = {"fsam": {"seconds": [0.1] * epoch, "curves": [{"train_loss": [float("nan"), 1.0]}]}}
    return Snapshot(epoch, record, tree)


def found(out, identity=IDENTITY):
    """The snapshot that a new process finds, if any."""
    store = Checkpoints(out, 1, identity)
    assert store.find() is None
    return store.restore(arrays()) if store.epoch else None


def assert_equal(a, b):
    assert a.epoch == b.epoch
    assert repr(a.record) == repr(b.record)  # NaN is NaN
    np.testing.assert_array_equal(a.arrays["fsam"]["params"], b.arrays["fsam"]["params"])


@pytest.fixture
def saved(tmp_path):
    Checkpoints(tmp_path, 1, IDENTITY).save(snapshot(3))
    return tmp_path


def test_what_is_saved_is_found_and_the_next_takes_its_place(saved):
    assert_equal(found(saved), snapshot(3))
    Checkpoints(saved, 1, IDENTITY).save(snapshot(12))
    assert [path.name for path in saved.iterdir()] == ["checkpoint.msgpack"]
    assert_equal(found(saved), snapshot(12))


def test_without_a_checkpoint_nothing_is_found_and_nothing_made(tmp_path):
    assert found(tmp_path) is None
    Checkpoints(tmp_path, 1, IDENTITY).refuse()
    Checkpoints(tmp_path, 1, IDENTITY).finish()
    assert list(tmp_path.iterdir()) == []


def test_finishing_removes_the_checkpoint_and_nothing_else(saved):
    (saved / "notes").write_text("mine")
    Checkpoints(saved, 0, IDENTITY).finish()
    assert [path.name for path in saved.iterdir()] == ["notes"]


def test_a_new_run_is_refused(saved):
    with pytest.raises(UserError, match=r"^--out: .*checkpoint.msgpack is .*unfinished.* --resume"):
        Checkpoints(saved, 1, IDENTITY).refuse()


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_kill_while_writing_leaves_the_previous_one_whole(saved, monkeypatch, step):
    def die(*args, **kwargs):
        raise SystemExit

    monkeypatch.setattr(os, step, die)
    monkeypatch.setattr(Path, "unlink", die)  # nobody cleans up after a kill
    with pytest.raises(SystemExit):
        Checkpoints(saved, 1, IDENTITY).save(snapshot(4))
    monkeypatch.undo()
    assert len(list(saved.iterdir())) == 2
    with OutputDirectory(saved):
        assert_equal(found(saved), snapshot(3))
    assert len(list(saved.iterdir())) == 1


def changed(**settings):
    identity = copy.deepcopy(IDENTITY)
    identity["settings"] |= settings
    return identity


def with_methods(**hyperparameters):
    return {"hyperparameters": hyperparameters}


OTHER = {
    "option": (changed(epochs=10), "--epochs 9 (now 10)"),
    "two": (
        changed(epochs=10, label_noise=0.2),
        "--epochs 9 (now 10), --label-noise 0.1 (now 0.2)",
    ),
    "new option": (changed(warm=1), "--warm absent (now 1)"),
    "hyperparameter": (
        IDENTITY | with_methods(fsam={"rho": 0.25}),
        "--fsam.rho 0.5 (now 0.25)",
    ),
    "methods": (
        changed(methods=["sam", "fsam"]) | with_methods(fsam={"rho": 0.5}, sam={"rho": 1.0}),
        "--methods fsam (now sam fsam)",
    ),
    "data": (changed(dataset="npz:x") | {"data": "4"}, "--dataset digits (now npz:x)"),
    "contents": (IDENTITY | {"data": "4"}, "--dataset digits (its contents have changed)"),
}


@pytest.mark.parametrize(("identity", "differences"), OTHER.values(), ids=OTHER)
def test_the_checkpoint_of_another_run_is_refused(saved, identity, differences):
    with pytest.raises(UserError) as error:
        Checkpoints(saved, 1, identity).find()
    path = saved / "checkpoint.msgpack"
    assert str(error.value) == (
        f"--resume: {path} is of a run with other settings: {differences}. Give the same ones, "
        "choose another --out, or remove the file to start again."
    )
    assert_equal(found(saved), snapshot(3))


def test_the_same_data_may_lie_elsewhere(saved):
    assert_equal(found(saved, changed(dataset="npz:elsewhere")), snapshot(3))


def test_other_versions_of_libraries_are_told(saved, monkeypatch):
    now = {**results.versions(), "jax": "99.9"}
    monkeypatch.setattr(results, "versions", lambda: now)
    store = Checkpoints(saved, 1, IDENTITY)
    note = store.find()
    assert "jax" in note
    assert "(now 99.9)" in note
    assert "optax" not in note
    assert_equal(store.restore(arrays()), snapshot(3))


def refusal(saved):
    """Why the checkpoint is refused; the message names the file and the remedy."""
    with pytest.raises(UserError) as error:
        found(saved)
    path = re.escape(str(saved / "checkpoint.msgpack"))
    message = re.fullmatch(
        rf"--resume: {path} cannot be used: (.*)\. Remove it to start again, or choose another "
        "--out.",
        str(error.value),
    )
    return message[1]


def test_another_version_of_the_format_is_refused(saved, monkeypatch):
    monkeypatch.setattr(checkpoint_file, "FORMAT_VERSION", 2)
    Checkpoints(saved, 1, IDENTITY).save(snapshot(3))
    monkeypatch.undo()
    assert re.match("it has version 2 of the format.*this one reads version 1", refusal(saved))


def test_a_file_of_another_kind_is_refused(saved):
    path = saved / "checkpoint.msgpack"
    for content in (b"", b"{}", b"[1, 2]\n", b"null\n\n", b"\xff\x00\n"):
        path.write_bytes(content)
        assert refusal(saved) == "it is damaged, or of another kind"
    path.write_text(json.dumps({"format": "png", "version": 1, "sha256": ""}))
    assert refusal(saved) == "it is a file of the kind png"
    path.unlink()
    path.mkdir()
    assert refusal(saved) == "it cannot be read (is a directory)"


def test_a_file_that_cannot_be_read_is_refused(saved, monkeypatch):
    def refuse(self):  # permissions do not bind every user that runs tests
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert refusal(saved) == "it cannot be read (permission denied)"


@pytest.mark.parametrize("length", [1, 30, 150, 500, -1000, -1])
def test_a_truncated_file_is_refused(saved, length):
    path = saved / "checkpoint.msgpack"
    path.write_bytes(path.read_bytes()[:length])
    assert "damaged" in refusal(saved)


def test_every_flipped_bit_is_found(saved):
    path = saved / "checkpoint.msgpack"
    whole = path.read_bytes()
    for position in np.random.default_rng(0).choice(len(whole), 200, replace=False):
        content = bytearray(whole)
        content[position] ^= 1 << (position % 8)
        path.write_bytes(content)
        assert re.search("damaged|of the kind|has version", refusal(saved))


@pytest.mark.parametrize(
    ("like", "reason"),
    [
        (arrays(params=(2, 200)), "shapes or dtypes"),
        (arrays(state=(np.ones(2),)), "arranged otherwise"),
        (arrays() | {"sam": {}}, "arranged otherwise"),
    ],
)
def test_arrays_of_another_kind_are_refused(saved, like, reason):
    store = Checkpoints(saved, 1, IDENTITY)
    store.find()
    with pytest.raises(UserError, match=f"cannot be used: its arrays .*{reason}"):
        store.restore(like)


def test_a_dtype_is_not_converted(saved):
    like = arrays()
    like["fsam"]["params"] = like["fsam"]["params"].astype(np.int32)
    store = Checkpoints(saved, 1, IDENTITY)
    store.find()
    with pytest.raises(UserError, match="shapes or dtypes"):
        store.restore(like)


def test_a_full_disk_is_told_and_leaves_the_previous_one(saved):
    resource = pytest.importorskip("resource")
    store = Checkpoints(saved, 1, IDENTITY)
    store.find()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(UserError) as error:
            store.save(snapshot(4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(error.value) == (
        f"--checkpoint-every: {saved / 'checkpoint.msgpack'} cannot be written (file too large). "
        "Put that right; --resume will continue from epoch 3."
    )
    assert len(list(saved.iterdir())) == 1
    assert_equal(found(saved), snapshot(3))


def test_the_first_lines_can_be_read_without_this_library(saved):
    head, rest = (saved / "checkpoint.msgpack").read_bytes().split(b"\n", 1)
    assert json.loads(head)["sha256"] == hashlib.sha256(rest).hexdigest()
    run = json.loads(rest.split(b"\n", 1)[0])
    assert (run["epoch"], run["identity"]["settings"]["epochs"]) == (3, 9)
