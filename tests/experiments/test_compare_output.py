"""Files that appear complete or not at all."""

import os
from pathlib import Path

import pytest

from sam_optax.experiments.errors import UserError
from sam_optax.experiments.output import OutputDirectory


def test_files_are_written_and_replaced(tmp_path):
    (tmp_path / "a").write_text("old")
    with OutputDirectory(tmp_path) as out:
        out.write({"a": b"new", "b": b"more"})
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"a": b"new", "b": b"more"}


def test_parents_are_created_and_taken_away_after_a_failure(tmp_path):
    path = tmp_path / "some" / "where"

    def interrupted():
        with OutputDirectory(path):
            assert path.is_dir()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_other_peoples_files_stay(tmp_path):
    path = tmp_path / "some" / "where"

    def interrupted():
        with OutputDirectory(path):
            (tmp_path / "some" / "notes").write_text("mine")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [p.name for p in tmp_path.rglob("*")] == ["some", "notes"]


@pytest.mark.parametrize("moment", ["fsync", "replace"])
@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_write_leaves_the_old_files_alone(tmp_path, monkeypatch, moment, failure):
    (tmp_path / "a").write_text("old")

    def fail(*args):
        raise failure

    def write():
        with OutputDirectory(tmp_path) as out:
            monkeypatch.setattr(os, moment, fail)
            out.write({"a": b"new", "b": b"more"})

    with pytest.raises(KeyboardInterrupt if failure is KeyboardInterrupt else UserError):
        write()
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"a": "old"}


def test_a_directory_that_cannot_be_is_refused_on_entering(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere")):
        match = f"^--out {path}: cannot be written to .*choose another directory"
        with pytest.raises(UserError, match=match), OutputDirectory(path):
            pytest.fail("entered")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_read_only_directory_is_refused(tmp_path, monkeypatch):
    def refuse(self, *args, **kwargs):  # permissions do not bind every user that runs tests
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match=r"permission denied"), OutputDirectory(tmp_path / "a"):
        pytest.fail("entered")
    assert list(tmp_path.iterdir()) == []
