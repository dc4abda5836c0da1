"""Files that appear complete or not at all."""

import os

import filelock
import pytest

from sam_optax.__main__ import main
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.reporting.output import claimed, write


def contents(path):
    return {of.name: of.read_text() for of in path.iterdir()}


def test_what_was_created_is_taken_away_after_a_failure_and_nothing_else(tmp_path):
    path = tmp_path / "some" / "where"

    def interrupted():
        with claimed(path, ("a",)):
            assert contents(path).keys() == {".sam_optax", ".sam_optax.lock"}
            (path.parent / "notes").write_text("mine")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [of.name for of in tmp_path.rglob("*")] == ["some", "notes"]


@pytest.mark.parametrize("moment", ["fsync", "replace"])
@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_write_leaves_the_old_files_alone(tmp_path, monkeypatch, moment, failure):
    (tmp_path / "a").write_text("old")

    def fail(*args):
        raise failure

    def written():
        with claimed(tmp_path, ()):
            monkeypatch.setattr(os, moment, fail)
            write(tmp_path, {"a": b"new", "b": b"more"})

    with pytest.raises(KeyboardInterrupt if failure is KeyboardInterrupt else UserError):
        written()
    assert contents(tmp_path) == {"a": "old", ".sam_optax": ""}


@pytest.mark.parametrize("path", ["file", "file/below"])
def test_a_directory_that_cannot_be_is_refused_on_entering(tmp_path, path):
    (tmp_path / "file").write_text("")
    match = f"^--out {tmp_path / path}: cannot be written to .*choose another directory"
    with pytest.raises(UserError, match=match), claimed(tmp_path / path, ()):
        pytest.fail("entered")
    assert contents(tmp_path) == {"file": ""}


def test_a_directory_is_for_one_process_at_a_time(tmp_path):
    partial = tmp_path / ".a.1.partial"
    with claimed(tmp_path, ("a",)):
        partial.write_text("somebody is writing")
        match = f"^--out {tmp_path}: another process is writing there; wait for it or choose"
        with pytest.raises(UserError, match=match), claimed(tmp_path, ()):
            pytest.fail("entered")
        assert partial.exists()
        write(tmp_path, {"a": b"new"})
    with claimed(tmp_path, ("a",)):
        pass
    assert contents(tmp_path) == {"a": "new", ".sam_optax": ""}


@pytest.mark.parametrize(
    "failure", [None, OSError(37, "No locks available"), NotImplementedError()]
)
def test_what_killed_processes_left_is_taken_away(tmp_path, monkeypatch, failure):
    def fail(*args, **kwargs):  # of a file system without locks
        raise failure

    if failure:
        monkeypatch.setattr(filelock.FileLock, "acquire", fail)
    killed = (".results.json.17.partial", ".sam_optax.lock", "a", ".sam_optax")
    mine = {".mine.partial": "", ".mine.1.partial": "", ".lock": ""}
    for name in (*killed, *mine):
        (tmp_path / name).write_text("")
    with claimed(tmp_path, ("results.json",)):
        write(tmp_path, {"a": b"new", "b": b"more"})
    assert contents(tmp_path) == {**mine, ".sam_optax": "", "a": "new", "b": "more"}


def test_files_of_others_are_not_replaced_and_links_not_followed(
    archive, tmp_path, capsys, trainer
):
    """Cases 77 and 82 of the collected mistakes: each of our names, by another's hand."""
    options = ["--dataset", f"npz:{archive}", "--batch-size", "20", "--epochs", "2", "--out"]

    def run(out):
        code = main(["compare", *options, str(out)])
        return code, capsys.readouterr().err

    (tmp_path / "elsewhere").write_text("mine")
    for name in ("results.json", "params.npz", "cost.png", "tune.json", "checkpoint.npz"):
        out = tmp_path / f"theirs {name}"
        out.mkdir()
        (out / name).write_text("mine")
        code, error = run(out)
        assert (code, f"--out: {out / name} was not written by this command" in error) == (2, True)
        assert contents(out) == {name: "mine"}
        (out / name).unlink()
        (out / name).symlink_to(tmp_path / "elsewhere")
        code, error = run(out)
        assert (code, f"--out: {out / name} is a link or a folder" in error) == (2, True)
        (tmp_path / "ours" / name).mkdir(parents=True)
        code, error = run(tmp_path / "ours")
        assert (code, f"--out: {tmp_path / 'ours' / name} is a link or a folder" in error) == (
            2,
            True,
        )
        (tmp_path / "ours" / name).rmdir()
        assert (tmp_path / "elsewhere").read_text() == "mine"
    assert not trainer.began_at
    (out / name).rename(out / "notes")
    for _ in range(2):  # other names, and our own, are no obstacle
        assert run(out)[0] == 0
        assert not (out / "sweep.png").exists()
        (out / "sweep.png").write_text("of an earlier run")
    (out / ".sam_optax").unlink()
    assert run(out)[0] == 0  # results of a run say whose they are
