"""Runs that stop and go on: to the last bit as if they had not, or refused with the reason."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tasks

from sam_optax.__main__ import main
from sam_optax.experiments import comparison
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.reporting import results
from sam_optax.experiments.training import work

slow = pytest.mark.slow
pytestmark = pytest.mark.usefixtures("compile_fast")


def checkpoints(path, every=1, identity=None, versions=None):
    from sam_optax.experiments.training.checkpoints import Checkpoints  # Orbax takes its time

    return Checkpoints(path / "checkpoint", every, identity or IDENTITY, versions or {"jax": "1"})


# What the command does with what it finds in the directory of an earlier run.


@pytest.fixture
def command(archive, tmp_path, capsys, monkeypatch):
    """Runs the command without pictures; returns its exit code and what it printed."""
    monkeypatch.setattr(comparison, "_draw", lambda *args: None)
    capsys.readouterr()

    def run(*more):
        out = tmp_path / "out"
        # Radii of its own, so that there is no note about them.
        options = f"--dataset npz:{archive} --batch-size 20 --epochs 5 --sam.rho 0.5"
        methods = () if "--methods" in more else ("--methods", "sgd", "sam")
        code = main(["compare", *options.split(), *methods, "--out", str(out), *more])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.fixture
def interrupted(trainer, command, tmp_path):
    """A run that was interrupted after a checkpoint; the path of that."""
    trainer.interrupt_after = 2
    code, _, errors = command("--checkpoint-every", "2")
    assert code == 130
    assert errors.splitlines()[-2:] == [
        "After epoch 2 there is a checkpoint; --resume continues from it.",
        "sam_optax: interrupted.",
    ]
    trainer.interrupt_after = None
    trainer.began_at.clear()
    return tmp_path / "out" / "checkpoint"


def contents(path):
    return {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_an_unfinished_run_is_not_lost_to_a_new_one(interrupted, command, trainer):
    before = contents(interrupted)
    for more in ((), ("--checkpoint-every", "1")):
        code, out, errors = command(*more)
        assert (code, out) == (2, "")
        assert errors == (
            f"sam_optax: --out: {interrupted} is the checkpoint of an unfinished run; add --resume "
            "to continue that run, remove the directory to start again, or choose another --out.\n"
        )
    assert contents(interrupted) == before
    assert trainer.began_at == []


def test_a_resumed_run_continues_and_then_is_finished(interrupted, command, trainer):
    code, table, errors = command("--resume")
    assert (code, errors) == (0, "")
    assert trainer.began_at == [2]
    assert not interrupted.exists()
    settings = json.loads((interrupted.parent / "results.json").read_text())["settings"]
    assert settings.keys().isdisjoint({"resume", "checkpoint_every", "out"})

    code, again, errors = command("--resume", "--checkpoint-every", "1")
    assert (code, errors) == (0, "")
    assert trainer.began_at == [2]
    assert again.splitlines()[:-1] == table.splitlines()[:-1]
    assert (
        again.splitlines()[-1] == f"This run is finished: its results are in {interrupted.parent}."
    )


def test_the_settings_must_be_the_same(interrupted, command, trainer):
    code, out, errors = command("--resume", "--lr", "0.2", "--sam.rho", "0.25", "--seeds", "4")
    assert (code, out) == (2, "")
    assert errors == (
        f"sam_optax: --resume: {interrupted} is of a run with other settings: --seeds 5 (now 4), "
        "--lr 0.1 (now 0.2), --sam.rho 0.5 (now 0.25). Give the same ones, choose another --out, "
        "or remove the directory to start again.\n"
    )
    for more, difference in {
        ("--methods", "sam"): "--methods sgd sam (now sam)",
        ("--label-noise", "0"): "--label-noise 0.4 (now 0.0)",
        ("--m", "5"): "--m 20 (now 5)",
        ("--dtype", "bfloat16"): "--dtype float32 (now bfloat16)",
        ("--save-every", "2"): "--save-every None (now 2)",
        ("--seed-offset", "1"): "--seed-offset 0 (now 1)",
    }.items():
        assert f" {difference}" in command("--resume", *more)[2]
    assert trainer.began_at == []


def test_the_data_must_be_the_same_and_may_lie_elsewhere(interrupted, command, arrays, tmp_path):
    np.savez(tmp_path / "elsewhere.npz", **arrays)
    np.savez(tmp_path / "changed.npz", **{**arrays, "y_train": arrays["y_train"][::-1]})
    code, _, errors = command("--resume", "--dataset", f"npz:{tmp_path / 'changed.npz'}")
    assert code == 2
    assert "changed.npz)" in errors
    assert command("--resume", "--dataset", f"npz:{tmp_path / 'elsewhere.npz'}")[0] == 0


def test_the_results_of_another_run_are_not_taken_for_this_one(command, trainer, tmp_path):
    assert command()[0] == 0
    before = (tmp_path / "out" / "results.json").read_bytes()
    code, out, errors = command("--resume", "--momentum", "0.5")
    assert (code, out) == (2, "")
    assert errors == (
        f"sam_optax: --resume: {tmp_path / 'out'} holds the results of a run with other settings: "
        "--momentum 0.9 (now 0.5). Choose another --out, or leave out --resume to replace them.\n"
    )
    assert (tmp_path / "out" / "results.json").read_bytes() == before
    assert command("--momentum", "0.5")[0] == 0
    assert trainer.began_at == [0, 0]


def test_a_checkpoint_counts_more_than_older_results(command, trainer):
    assert command()[0] == 0
    trainer.interrupt_after = 4
    assert command("--checkpoint-every", "4")[0] == 130
    trainer.interrupt_after = None
    assert command("--resume")[0] == 0
    assert trainer.began_at == [0, 0, 4]


@pytest.mark.parametrize("content", [None, "", "[]", '{"format": "png"}'])
def test_with_nothing_to_resume_it_starts_from_the_beginning(command, trainer, tmp_path, content):
    if content is not None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "results.json").write_text(content)
    code, _, errors = command("--resume", "--checkpoint-every", "2")
    assert code == 0
    assert errors == f"There is no checkpoint in {tmp_path / 'out'}: starting from the beginning.\n"
    assert trainer.began_at == [0]


def test_the_results_of_an_older_version_are_refused_by_name(command, trainer, tmp_path):
    (tmp_path / "out").mkdir()
    path = tmp_path / "out" / "results.json"
    path.write_text('{"format": "sam_optax.compare", "format_version": 1}')
    code, _, errors = command("--resume")
    assert code == 2
    assert re.match(f"sam_optax: {re.escape(str(path))}: has format sam_optax.compare 1", errors)
    assert not trainer.began_at


def test_an_interrupt_before_the_first_checkpoint_leaves_nothing(command, trainer, tmp_path):
    trainer.interrupt_after = 0
    code, _, errors = command("--checkpoint-every", "2")
    assert (code, errors) == (130, "sam_optax: interrupted.\n")
    assert not (tmp_path / "out" / "checkpoint").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("failure", [KeyboardInterrupt, UserError("no")])
def test_the_checkpoint_is_kept_where_the_results_cannot_be_written(
    interrupted, command, monkeypatch, failure, trainer
):
    def fail(*args, **options):
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(results, "to_csv", fail)
        code, table, _ = command("--resume")
    assert code == (2 if isinstance(failure, UserError) else 130)
    assert re.search(r"^sam +ρ 0.5 +50.00", table, re.M)
    assert not (interrupted.parent / "results.json").exists()
    assert command("--resume")[0] == 0
    assert trainer.began_at == [2, 2]


def test_other_files_in_the_directory_stay(interrupted, command):
    (interrupted.parent / "notes").write_text("mine")
    assert command("--resume")[0] == 0
    assert (interrupted.parent / "notes").read_text() == "mine"


def test_paths_that_are_no_text_keep_checkpoints(trainer, archive, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(comparison, "_draw", lambda *args: None)
    data, out = tmp_path / "ünï \udcff $x.npz", tmp_path / "out [ünï] $y"
    shutil.copy(archive, data)
    options = ["--dataset", f"npz:{data}", "--batch-size", "20", "--epochs", "3", "--out", str(out)]
    trainer.interrupt_after = 2
    assert main(["train", "--method", "sgd", *options, "--checkpoint-every", "1"]) == 130
    trainer.interrupt_after = None
    assert main(["train", "--method", "sgd", *options, "--resume"]) == 0
    assert trainer.began_at == [0, 2]


# The checkpoint itself.

IDENTITY = {
    "settings": {"dataset": "digits", "epochs": 9, "label_noise": 0.1},
    "methods": {"fsam": {"fsam.rho": 0.5}},
    "data": "0123",
}


def arrays_of(shape=(2, 300), dtype=jnp.float32, state=()):
    params = jnp.asarray(np.random.default_rng(3).normal(size=shape), dtype)
    return {"fsam": {"params": params, "state": (jnp.asarray(1), {}, jax.random.key(2), *state)}}


def snapshot(epoch):
    record = {"fsam": {"seconds": [0.1] * epoch, "curve": [{"train_loss": [float("nan"), 1.0]}]}}
    return epoch, record, arrays_of()


@pytest.fixture
def saved(tmp_path):
    checkpoints(tmp_path).save(*snapshot(3))
    return tmp_path


def found(out, identity=None, like=None):
    """The epoch, record and arrays that a new process finds, if any."""
    store = checkpoints(out, identity=identity)
    assert store.find() is None
    return (store.epoch, *store.restore(like or arrays_of())) if store.epoch else None


def assert_whole(restored, epoch=3):
    assert repr(restored[:2]) == repr(snapshot(epoch)[:2])  # NaN is NaN
    plain = lambda leaf: (
        jax.random.key_data(leaf)
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        else leaf
    )
    same = lambda a, b: np.testing.assert_array_equal(plain(a), plain(b))
    jax.tree.map(same, restored[2], arrays_of())


def test_what_is_saved_is_found_and_the_next_takes_its_place(saved):
    assert_whole(found(saved))
    checkpoints(saved).save(*snapshot(12))
    assert_whole(found(saved), 12)
    assert [p.name for p in (saved / "checkpoint").iterdir()] == ["12"]


def test_without_a_checkpoint_nothing_is_found_and_nothing_made(tmp_path):
    assert found(tmp_path) is None
    checkpoints(tmp_path).refuse()
    checkpoints(tmp_path).finish()
    assert list(tmp_path.iterdir()) == []


OTHER = {
    "two": (
        {"settings": {**IDENTITY["settings"], "epochs": 10, "label_noise": 0.2}},
        "--epochs 9 (now 10), --label-noise 0.1 (now 0.2)",
    ),
    "new option": ({"settings": {**IDENTITY["settings"], "warm": 1}}, "--warm None (now 1)"),
    "hyperparameter": ({"methods": {"fsam": {"fsam.rho": 0.2}}}, "--fsam.rho 0.5 (now 0.2)"),
    "methods": ({"methods": {"sam": {}, "fsam": {"fsam.rho": 0.5}}}, "--methods fsam (now sam fs"),
    "data": (
        {"settings": {**IDENTITY["settings"], "dataset": "npz:x"}, "data": "4"},
        "--dataset digits (now npz:x)",
    ),
    "contents": ({"data": "4"}, "--dataset digits (its contents have changed)"),
}


@pytest.mark.parametrize(("changes", "differences"), OTHER.values(), ids=OTHER)
def test_the_checkpoint_of_another_run_is_refused(saved, changes, differences):
    with pytest.raises(UserError, match=re.escape(f"with other settings: {differences}")):
        checkpoints(saved, identity={**IDENTITY, **changes}).find()
    assert_whole(found(saved))


def test_other_versions_of_libraries_are_told(saved):
    store = checkpoints(saved, versions={"jax": "99.9", "optax": "2"})
    assert store.find() == (
        "The checkpoint was written with jax 1 (now 99.9), optax None (now 2): the numbers may "
        "differ a little from those of an uninterrupted run."
    )
    assert_whole((3, *store.restore(arrays_of())))


@pytest.mark.parametrize(
    ("like", "reason"),
    [
        (arrays_of((2, 200)), r"\['params'\] is float32\[2, 300\] there, and float32\[2, 200\]"),
        (arrays_of(dtype=jnp.bfloat16), r"\['params'\] is float32\[2, 300\] there, and bfloat16"),
        (arrays_of(state=(jnp.ones(2),)), r"\['state'\]\[3\] is not in the checkpoint"),
        ({}, "is only in the checkpoint"),
        (arrays_of() | {"sam": {"x": jnp.ones(1)}}, r"\['sam'\]\['x'\] is not in the checkpoint"),
    ],
)
def test_other_shapes_dtypes_and_states_are_refused_by_name(saved, like, reason):
    store = checkpoints(saved)
    store.find()
    with pytest.raises(UserError, match=f"cannot be used: .*{reason}.*Remove it to start again"):
        store.restore(like)


def test_another_version_of_the_format_is_refused(saved, monkeypatch):
    from sam_optax.experiments.training import checkpoints as module

    monkeypatch.setattr(module, "FORMAT_VERSION", 3)
    with pytest.raises(UserError, match=r"it is of another format, sam_optax.checkpoint 2"):
        found(saved)


@slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_every_damage_is_found_or_does_no_harm(saved, capfd):
    """Bits flipped and files cut off: Orbax itself reads some of them as if they were whole."""
    refused = []
    for path in sorted(p for p in (saved / "checkpoint").rglob("*") if p.is_file()):
        whole = path.read_bytes()
        rng = np.random.default_rng(len(whole))
        flipped = [bytearray(whole) for _ in range(4)]
        for content in flipped:
            content[rng.integers(len(whole))] ^= 1 << rng.integers(8)
        for content in (*flipped, whole[: len(whole) // 2], b""):
            path.write_bytes(content)
            try:
                assert_whole(found(saved))
            except UserError as error:
                refused.append(str(error))
        path.write_bytes(whole)
    assert len(refused) > 20
    assert all(re.match(r"--resume: .* cannot be used: .*\. Remove it to", r) for r in refused)
    assert_whole(found(saved))


def test_the_checkpoint_of_an_older_version_is_refused_by_name(tmp_path):
    (tmp_path / "checkpoint.msgpack").write_bytes(b"old")
    with pytest.raises(
        UserError, match=r"--resume: .*checkpoint.msgpack is the checkpoint of an o"
    ):
        found(tmp_path)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk_is_told_and_leaves_the_previous_one(saved, caplog):
    resource = pytest.importorskip("resource")
    store = checkpoints(saved)
    store.find()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(UserError) as error:
            store.save(*snapshot(4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(error.value) == (
        f"--checkpoint-every: {saved / 'checkpoint'} cannot be written (file too large). Fix "
        "the cause; --resume will continue from epoch 3."
    )
    assert not caplog.records
    assert_whole(found(saved))


# Trainings that stop and go on.


class Stop(Exception):
    pass


class Stopping(tasks.Silent):
    """Stops after the checkpoint of an epoch."""

    def __init__(self, stop_at):
        super().__init__()
        self._stop_at = stop_at

    def done(self, kind, seconds, share=1.0):
        super().done(kind, seconds, share)
        if kind == "checkpoint" and self.pieces[kind] == self._stop_at:
            raise Stop


TASKS = {
    "vectors": lambda arrays: (
        tasks.make(
            tasks.vectors(arrays), "rsam", "fsam", batch_size=12, epochs=4, seeds=2, label_noise=0.2
        ),
        1,
    ),
    "images": lambda _: (
        tasks.make(
            tasks.images(),
            "esam",
            **{"epochs": 3, "crop": 1, "mixup": 0.3, "count": 2, "dtype": "bfloat16"},
        ),
        2,
    ),
    "a batch in the state": lambda _: (
        tasks.make(tasks.images(), "sampa", epochs=3, crop=1, count=2, seeds=2),
        2,
    ),
    "images on disk": lambda _: (tasks.make(tasks.images(True), "ss_sam", epochs=3, crop=1), 1),
}


@slow
@pytest.mark.parametrize("name", TASKS)
def test_stopping_and_going_on_changes_no_bit(name, arrays, tmp_path, monkeypatch):
    monkeypatch.setattr(work, "REFERENCE_ROUNDS", 2)  # fewer than the epochs
    task, count = TASKS[name](arrays)
    timed = name == "vectors"
    options = {"count": count, "timed": timed, "watch": timed}
    straight = tasks.run(task, **options)
    epochs = max(entry.recipe.epochs for entry in task.entries.values())
    stops = (1, epochs) if timed else (2,)
    last = stops[-1]
    for stop in stops:
        store = checkpoints(tmp_path)
        assert store.find() is None
        with pytest.raises(Stop):
            tasks.run(task, listener=Stopping(stop), checkpoints=store, **options)
    store = checkpoints(tmp_path)
    assert store.find() is None
    assert store.epoch == last
    listener = tasks.Silent()
    resumed = tasks.run(task, listener=listener, checkpoints=store, **options)
    announced = work.work(task, None, 1, timed)
    assert listener.pieces == {k: pytest.approx(n) for k, (_, n) in announced.items()}
    before = work.work(task, last, 1, timed)
    assert listener.before == {k: n for k, (_, n) in before.items()}
    for method, outcome in resumed.items():
        expected = straight[method]
        jax.tree.map(np.testing.assert_array_equal, outcome.variables, expected.variables)
        assert outcome.curves.keys() == expected.curves.keys()
        for key, values in outcome.curves.items():
            np.testing.assert_array_equal(values, expected.curves[key], strict=True)
        np.testing.assert_array_equal(outcome.sharpness, expected.sharpness)
        assert len(outcome.seconds) == epochs  # what was measured before counts
        assert outcome.cost > 0 or not timed


# Processes that are killed.

EPOCHS = 24
DEADLINE = 200
DIES = """
import os, signal, sys
event, name, times = {}
def audit(kind, arguments):
    global times
    if kind == event and name in str(arguments[0]):
        times -= 1
        if times == 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(audit)
from sam_optax.__main__ import main
sys.exit(main())
"""
"""A process that kills itself where it opens or renames a file for the n-th time."""


@pytest.fixture(scope="module")
def start(archive, tmp_path_factory):
    """Starts processes that find each other's compiled programs in a cache."""
    environment = {**os.environ, "MPLBACKEND": "Agg"}
    arguments = f"compare --dataset npz:{archive} --batch-size 20 --seeds 2 --methods rsam fsam"

    def start(out, *more, dies_at=None):
        program = ["-m", "sam_optax"] if dies_at is None else ["-c", DIES.format(dies_at)]
        given = [*arguments.split(), "--epochs", str(EPOCHS), "--out", str(out), *more]
        return subprocess.Popen(
            [sys.executable, *program, *given],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    return start


def ended(process):
    """What a process that ends by itself prints."""
    try:
        out, errors = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert "Warning" not in errors
    return out, errors


def killed(process, moment, delay):
    """Kills a process some time after a moment has come, unless it does so itself."""
    lines = []
    reader = threading.Thread(target=lambda: lines.extend(process.stderr), daemon=True)
    reader.start()
    end = time.monotonic() + DEADLINE
    try:
        while process.poll() is None and not moment(lines):
            assert time.monotonic() < end, lines
            time.sleep(0.0002)
        time.sleep(delay)
    finally:
        process.kill()
        process.wait(timeout=DEADLINE)
    reader.join(timeout=DEADLINE)
    process.stdout.close()
    process.stderr.close()
    assert process.returncode == -9, lines
    assert not any("Warning" in line for line in lines), lines


def moments(out):
    """Moments to kill the next process, over the life of a run.

    A moment is what to wait for and how long to wait then, or where the process kills itself.
    """
    rng = np.random.default_rng(0)

    def reaches(epoch):
        return lambda _: checkpointed(out) >= epoch

    never = lambda _: False
    return [
        (reaches(int(rng.integers(2, EPOCHS // 2 - 2))), rng.uniform(0, 0.02), None),
        (never, 0, ("open", "commit_success", int(rng.integers(1, 9)))),
        (never, 0, ("open", "results.csv", 1)),
    ]


def checkpointed(out):
    """The epochs that the checkpoint has done."""
    try:
        return max((int(p.name) for p in (out / "checkpoint").glob("[0-9]*[0-9]")), default=0)
    except ValueError:  # one that is being written
        return 0


def without_times(out):
    found = json.loads((out / "results.json").read_text())
    for method in found["methods"]:
        for name in ("step_cost", "epoch_seconds", "compile_seconds", "examples_per_second"):
            assert method.pop(name) > 0
    rows = list(csv.DictReader((out / "results.csv").read_text().splitlines()))
    return found, [{**row, "step_cost": None} for row in rows]


def table(text):
    """The table without the column of the step costs, and what is said of where the files are."""
    return [line.rsplit(maxsplit=1)[0] for line in text.splitlines()[:-1] if line]


@slow
@pytest.mark.skipif(os.name == "nt", reason="sends a POSIX signal")
def test_kills_change_nothing(start, tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "out"
    expected, _ = ended(start(whole))
    arguments = (out, "--checkpoint-every", "1", "--resume")
    for moment, delay, dies_at in moments(out):
        killed(start(*arguments, dies_at=dies_at), moment, delay)
    text, _ = ended(start(*arguments))
    assert table(text) == table(expected)
    (ours, rows), (theirs, other_rows) = without_times(out), without_times(whole)
    for a, b in zip(ours["methods"], theirs["methods"], strict=True):
        assert a == b
    assert (ours, rows) == (theirs, other_rows)
    with np.load(out / "params.npz") as a, np.load(whole / "params.npz") as b:
        assert a.files == b.files
        for name in a.files:
            np.testing.assert_array_equal(a[name].view(np.uint32), b[name].view(np.uint32))
    lines = [(path / "metrics.jsonl").read_text().splitlines() for path in (out, whole)]
    assert sorted(lines[0]) == sorted(lines[1])
    assert {p.name for p in out.iterdir()} == {p.name for p in whole.iterdir()}
