"""Files that appear complete or not at all."""

import os
from pathlib import Path

import filelock
import pytest

from sam_optax.experiments.errors import UserError
from sam_optax.experiments.reporting.output import OutputDirectory


def contents(path):
    return {of.name: of.read_text() for of in path.iterdir()}


@pytest.mark.parametrize("others", [(), ("notes",)])
def test_what_was_created_is_taken_away_after_a_failure(tmp_path, others):
    path = tmp_path / "some" / "where"

    def interrupted():
        with OutputDirectory(path):
            assert path.is_dir()
            for name in others:
                (path.parent / name).write_text("mine")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [of.name for of in tmp_path.rglob("*")] == (["some", *others] if others else [])


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
    assert contents(tmp_path) == {"a": "old"}


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


def test_a_directory_is_for_one_process_at_a_time(tmp_path):
    partial = tmp_path / ".a.1.partial"
    with OutputDirectory(tmp_path) as out:
        partial.write_text("somebody is writing")
        match = f"^--out {tmp_path}: another process is writing there; wait for it or choose"
        with pytest.raises(UserError, match=match), OutputDirectory(tmp_path):
            pytest.fail("entered")
        assert partial.exists()
        out.write({"a": b"new"})
    with OutputDirectory(tmp_path):
        pass
    assert contents(tmp_path) == {"a": "new"}


@pytest.mark.parametrize(
    "failure", [None, OSError(37, "No locks available"), NotImplementedError()]
)
def test_what_killed_processes_left_is_taken_away(tmp_path, monkeypatch, failure):
    def fail(*args, **kwargs):  # of a file system without locks
        raise failure

    if failure:
        monkeypatch.setattr(filelock.FileLock, "acquire", fail)
    for name in (".results.csv.17.partial", ".probe.42.partial", ".mine.partial", ".lock", "a"):
        (tmp_path / name).write_text("")
    with OutputDirectory(tmp_path) as out:
        out.write({"a": b"new", "b": b"more"})
    assert contents(tmp_path) == {".mine.partial": "", "a": "new", "b": "more"}
