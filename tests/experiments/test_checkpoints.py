"""Runs that stop and go on: to the last bit as if they had not, or refused with the reason."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
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


def checkpoints(path, identity=None, versions=None):
    from sam_optax.experiments.training.checkpoints import Checkpoints  # Orbax takes its time

    return Checkpoints(path / "checkpoint", 1, identity or IDENTITY, versions or {"jax": "1"})


def contents(path):
    return {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}


def names(path):
    return sorted(p.name for p in path.iterdir())


def damage(checkpoint):
    """Flips a bit of the largest file, which has the arrays."""
    path = max((p for p in checkpoint.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# What the command does with what it finds in the directory of an earlier run.


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def command(archive, out, capsys, monkeypatch):
    """Runs the command without figures; returns its exit code and what it printed."""
    monkeypatch.setattr(comparison, "_draw", lambda out, found: out.write({"report.html": b""}))
    capsys.readouterr()

    def run(*more):
        # Radii of its own, so that there is no note about them.
        options = f"--dataset npz:{archive} --batch-size 20 --epochs 5 --sam.rho 0.5"
        methods = () if "--methods" in more else ("--methods", "sgd", "sam")
        code = main(["compare", *options.split(), *methods, "--out", str(out), *more])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.fixture
def interrupted(trainer, command, out):
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
    return out / "checkpoint"


def test_an_unfinished_run_is_not_lost_to_a_new_one(interrupted, command, trainer):
    before = contents(interrupted)
    for more in ((), ("--checkpoint-every", "1")):
        code, table, errors = command(*more)
        assert (code, table) == (2, "")
        assert errors == (
            f"sam_optax: --out: {interrupted} is the checkpoint of an unfinished run; add --resume "
            "to continue that run, remove the directory to start again, or choose another --out.\n"
        )
    assert contents(interrupted) == before
    assert trainer.began_at == []


def test_a_resumed_run_continues_and_then_is_finished(interrupted, command, trainer, out):
    code, table, errors = command("--resume")
    assert (code, errors) == (0, "")
    assert trainer.began_at == [2]
    assert not interrupted.exists()
    settings = json.loads((out / "results.json").read_text())["settings"]
    assert settings.keys().isdisjoint({"resume", "checkpoint_every", "out"})
    (out / "report.html").unlink()  # as after a kill before it was written
    code, again, errors = command("--resume", "--checkpoint-every", "1")
    assert (code, errors) == (0, "")
    assert trainer.began_at == [2]
    assert again.splitlines()[:-1] == table.splitlines()[:-1]
    assert again.splitlines()[-1] == f"This run is finished: its results are in {out}."
    assert (out / "report.html").exists()


def test_a_damaged_checkpoint_falls_back_to_the_one_before(interrupted, command, trainer):
    trainer.interrupt_after = 4
    assert command("--checkpoint-every", "2", "--resume")[0] == 130
    older, newer = sorted(interrupted.iterdir())
    assert (older.name, newer.name) == ("sam_optax_v3_2", "sam_optax_v3_4")
    damage(newer)
    trainer.interrupt_after = 3  # which takes the place of the damaged one
    _, _, errors = command("--checkpoint-every", "1", "--resume")
    assert errors.startswith(f"{interrupted}: the checkpoint of epoch 4 is damaged: ")
    assert errors.splitlines()[0].endswith("; using epoch 2.")
    assert trainer.began_at == [2, 2]
    assert names(interrupted) == ["sam_optax_v3_2", "sam_optax_v3_3"]
    for path in interrupted.iterdir():
        damage(path)
    code, table, errors = command("--resume")
    assert (code, table, errors.count("\n")) == (2, "", 1)
    assert re.search("cannot be used: .*epoch 3 is damaged: .*epoch 2 is damaged: .*Remove", errors)


def put(path):
    """Another tool's file, and a step of its Orbax."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "my_model.pt").write_text("mine")
    (path / "7").mkdir()
    (path / "7" / "commit_success.txt").write_text("mine")


def test_files_of_others_stay_and_their_directory_is_not_adopted(command, trainer, out):
    put(out / "checkpoint")
    before = contents(out / "checkpoint")
    for more in (("--checkpoint-every", "2"), ("--resume",)):
        code, table, errors = command(*more)
        assert (code, table, errors.count("\n")) == (2, "", 1)
        assert "checkpoint is not a directory of this version's checkpoints; move it" in errors
    assert command()[0] == 0  # it needs none
    assert command("--resume")[0] == 0
    assert contents(out / "checkpoint") == before
    assert trainer.began_at == [0]


def test_files_of_others_among_checkpoints_stay(interrupted, command, trainer, out):
    put(interrupted)
    trainer.interrupt_after = 4
    assert command("--resume", "--checkpoint-every", "4")[0] == 130
    trainer.interrupt_after = None
    (out / "notes").write_text("mine")
    assert command("--resume")[0] == 0
    assert trainer.began_at == [2, 4]
    assert names(interrupted) == ["7", "my_model.pt"]
    assert (interrupted / "7" / "commit_success.txt").exists()
    assert (out / "notes").exists()
    assert "This run is finished" in command("--resume")[1]


def test_a_link_is_not_followed(interrupted, command, trainer, tmp_path):
    elsewhere = interrupted.rename(tmp_path / "elsewhere")
    interrupted.symlink_to(elsewhere, target_is_directory=True)
    before = contents(elsewhere)
    for more in (("--checkpoint-every", "2"), ("--resume",)):
        code, _, errors = command(*more)
        assert (code, errors.count("\n")) == (2, 1)
        assert "checkpoint is a symbolic link; move it" in errors
    assert contents(elsewhere) == before
    assert trainer.began_at == []


OTHERS = {
    "empty": "{}",
    "truncated": '{"identity": {"data": ',
    "another tool's": '{"study": "optuna", "trials": []}',
    "a list": "[1]",
    "changed": '{"identity": {}, "trials": {}, "sha256": "0"}',
}


@pytest.mark.parametrize("content", OTHERS.values(), ids=OTHERS)
def test_a_search_that_is_damaged_or_of_another_tool_is_refused(command, trainer, out, content):
    out.mkdir()
    path = out / "tune.json"
    path.write_text(content)
    for more in ((), ("--resume",)):
        code, table, errors = command("--tune", *more)
        assert (code, table, errors.count("\n")) == (2, "", 1)
        assert errors.startswith(f"sam_optax: --tune: {path} is damaged, or of another program (")
    assert command()[0] == 0
    assert path.read_text() == content


def test_the_settings_must_be_the_same(interrupted, command, trainer):
    code, table, errors = command("--resume", "--lr", "0.2", "--sam.rho", "0.25", "--seeds", "4")
    assert (code, table) == (2, "")
    assert errors == (
        f"sam_optax: --resume: {interrupted} is of a run with other settings: --seeds 5 (now 4), "
        "--lr 0.1 (now 0.2), --sam.rho 0.5 (now 0.25). Give the same ones, choose another --out, "
        "or remove the directory to start again.\n"
    )
    for more, difference in {
        ("--methods", "sam"): "--methods sgd sam (now sam)",
        ("--label-noise", "0"): "--label-noise 0.4 (now 0.0)",
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
    code, table, errors = command("--resume", "--momentum", "0.5")
    assert (code, table) == (2, "")
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


def test_paths_that_are_no_text_keep_checkpoints(trainer, archive, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(comparison, "_draw", lambda *args: None)
    data, out = tmp_path / "ünï \udcff $x.npz", tmp_path / "out [ünï] $y"
    shutil.copy(archive, data)
    options = ["--dataset", f"npz:{data}", "--batch-size", "20", "--epochs", "3", "--out", str(out)]
    trainer.interrupt_after = 2
    assert main(["compare", "--methods", "sgd", *options, "--checkpoint-every", "1"]) == 130
    trainer.interrupt_after = None
    assert main(["compare", "--methods", "sgd", *options, "--resume"]) == 0
    assert trainer.began_at == [0, 2]


# The checkpoint itself.

IDENTITY = {"data": ["digits", "0123"], "methods": {"fsam": {"epochs": 9, "fsam.rho": 0.5}}}


def arrays_of(shape=(2, 300), dtype=jnp.float32, state=()):
    params = jnp.asarray(np.random.default_rng(3).normal(size=shape), dtype)
    half = jnp.ones(3, jnp.bfloat16)
    key = jax.random.key(2)
    return {"fsam": {"params": params, "state": (jnp.asarray(1), {}, key, half, *state)}}


def snapshot(epoch):
    record = {"fsam": {"seconds": [0.1] * epoch, "curve": [{"train_loss": [float("nan"), 1.0]}]}}
    return epoch, record, arrays_of()


@pytest.fixture
def saved(tmp_path):
    """Two checkpoints."""
    store = checkpoints(tmp_path)
    store.save(*snapshot(3))
    store.save(*snapshot(12))
    return tmp_path


def assert_whole(store):
    record, arrays = store.restore(arrays_of())
    assert repr(record) == repr(snapshot(store.epoch)[1])  # NaN is NaN
    plain = lambda leaf: (
        jax.random.key_data(leaf)
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        else leaf
    )
    same = lambda a, b: np.testing.assert_array_equal(plain(a), plain(b), strict=True)
    jax.tree.map(same, arrays, arrays_of())


def test_what_is_saved_is_found_and_two_are_kept(saved):
    store = checkpoints(saved)
    assert store.find() == []
    assert_whole(store)
    store.save(*snapshot(13))
    assert names(saved / "checkpoint") == ["sam_optax_v3_12", "sam_optax_v3_13"]


def test_without_a_checkpoint_nothing_is_found_and_nothing_made(tmp_path):
    store = checkpoints(tmp_path)
    assert store.find() == []
    store.refuse(foreign=True)
    store.finish()
    assert names(tmp_path) == []


METHOD = IDENTITY["methods"]["fsam"]
OTHER = {
    "two": (
        {"methods": {"fsam": {"epochs": 10}}},
        "--epochs 9 (now 10), --fsam.rho 0.5 (now None)",
    ),
    "new option": ({"methods": {"fsam": {**METHOD, "warm": 1}}}, "--warm None (now 1)"),
    "methods": ({"methods": {"sam": {}, "fsam": METHOD}}, "--methods fsam (now sam fsam)"),
    "data": ({"data": ["npz:x", "4"]}, "--dataset digits (now npz:x)"),
    "contents": ({"data": ["digits", "4"]}, "--dataset digits (its contents have changed)"),
}


@pytest.mark.parametrize(("changes", "differences"), OTHER.values(), ids=OTHER)
def test_the_checkpoint_of_another_run_is_refused(saved, changes, differences):
    with pytest.raises(UserError, match=re.escape(f"with other settings: {differences}.")):
        checkpoints(saved, identity={**IDENTITY, **changes}).find()


def test_other_versions_of_libraries_are_told(saved):
    store = checkpoints(saved, versions={"jax": "99.9", "optax": "2"})
    assert store.find() == [
        "The checkpoint was written with jax 1 (now 99.9), optax None (now 2): the numbers may "
        "differ a little from those of an uninterrupted run."
    ]
    assert_whole(store)


@pytest.mark.parametrize(
    ("like", "reason"),
    [
        (arrays_of((2, 200)), r"\['params'\] float32\[2, 200\], .*\['params'\] float32\[2, 300\]"),
        (arrays_of(dtype=jnp.bfloat16), r"\['params'\] bfloat16\[2, 300\], "),
        (arrays_of(state=(jnp.ones(2),)), r"\['state'\]\[4\] float32\[2\]"),
        ({}, r"\['params'\] float32\[2, 300\], "),
    ],
)
def test_other_shapes_dtypes_and_states_are_refused_by_name(saved, like, reason):
    store = checkpoints(saved)
    store.find()
    with pytest.raises(UserError, match=f"cannot be used: .*{reason}.*Remove it to start again"):
        store.restore(like)


@slow
def test_every_damage_is_found_or_does_no_harm(saved):
    """Bits flipped and files cut off: Orbax itself reads some of them as if they were whole."""
    told = []
    newest = saved / "checkpoint" / "sam_optax_v3_12"
    for path in sorted(p for p in newest.rglob("*") if p.is_file()):
        whole = path.read_bytes()
        rng = np.random.default_rng(len(whole))
        flipped = [bytearray(whole) for _ in range(4)]
        for content in flipped:
            content[rng.integers(len(whole))] ^= 1 << rng.integers(8)
        for content in (*flipped, whole[: len(whole) // 2], b""):
            path.write_bytes(content)
            store = checkpoints(saved)
            told += (notes := store.find())
            assert store.epoch == (3 if notes else 12)
            assert_whole(store)
        path.write_bytes(whole)
    assert len(told) > 20
    assert all(re.search(r": the checkpoint of epoch 12 is damaged: .*; using", n) for n in told)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk_is_told_and_leaves_the_previous_one(saved, caplog):
    resource = pytest.importorskip("resource")
    store = checkpoints(saved)
    store.find()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(UserError) as error:
            store.save(*snapshot(14))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(error.value) == (
        f"--checkpoint-every: {saved / 'checkpoint'} cannot be written (file too large). Fix "
        "the cause; --resume will continue from epoch 12."
    )
    assert not caplog.records
    store = checkpoints(saved)
    assert store.find() == []
    assert_whole(store)


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
        assert store.find() == []
        with pytest.raises(Stop):
            tasks.run(task, listener=Stopping(stop), checkpoints=store, **options)
    if name == "images":  # it goes on from the other one
        damage(tmp_path / "checkpoint" / f"sam_optax_v3_{last}")
        last -= 1
    store = checkpoints(tmp_path)
    assert len(store.find()) == (name == "images")
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
def start(archive):
    """Starts processes that find each other's compiled programs in a cache."""
    environment = {**os.environ, "MPLBACKEND": "Agg"}
    arguments = f"compare --dataset npz:{archive} --batch-size 20 --seeds 2 --methods rsam fsam"

    def start(out, *more, dies_at=None, nohup=()):
        program = ["-m", "sam_optax"] if dies_at is None else ["-c", DIES.format(dies_at)]
        given = [*arguments.split(), "--epochs", str(EPOCHS), "--out", str(out), *more]
        return subprocess.Popen(
            [*nohup, sys.executable, *program, *given],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    return start


def ended(process, code=0):
    """What a process prints that ends by itself, or by what was sent to it."""
    try:
        out, errors = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
    assert process.returncode == code, errors
    assert "Warning" not in errors
    return out, errors


def reached(process, out, epoch):
    """Waits until there is a checkpoint of an epoch."""
    end = time.monotonic() + DEADLINE
    while process.poll() is None and checkpointed(out) < epoch:
        assert time.monotonic() < end
        time.sleep(0.0002)
    return process


def checkpointed(out):
    """The epochs that the newest checkpoint has done."""
    found = (p.name.removeprefix("sam_optax_v3_") for p in (out / "checkpoint").glob("*"))
    return max((int(epoch) for epoch in found if epoch.isdigit()), default=0)


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
@pytest.mark.skipif(os.name == "nt", reason="sends POSIX signals")
def test_kills_and_signals_change_nothing(start, tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "out"
    expected, _ = ended(start(whole))
    arguments = (out, "--checkpoint-every", "1", "--resume")
    rng = np.random.default_rng(0)
    for number, code in {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGHUP: 129}.items():
        process = reached(start(*arguments), out, checkpointed(out) + int(rng.integers(2, 5)))
        time.sleep(rng.uniform(0, 0.02))
        process.send_signal(number)
        _, errors = ended(process, code)
        if code > 0:
            hint, last = errors.splitlines()[-2:]
            assert re.search(r"After epoch \d+ there is a checkpoint; --resume continues", hint)
            assert last == "sam_optax: interrupted."
    for name in ("commit_success", "results.csv", "report.html"):
        ended(start(*arguments, dies_at=("open", name, 1)), -9)
    assert (out / "results.json").exists()
    assert checkpointed(out)  # removed after all is written
    process = start(*arguments, nohup=["nohup"])
    time.sleep(1)
    process.send_signal(signal.SIGHUP)
    text, _ = ended(process)
    assert table(text) == table(expected)
    assert without_times(out) == without_times(whole)
    with np.load(out / "params.npz") as a, np.load(whole / "params.npz") as b:
        assert a.files == b.files
        for name in a.files:
            np.testing.assert_array_equal(a[name].view(np.uint32), b[name].view(np.uint32))
    lines = [(path / "metrics.jsonl").read_text().splitlines() for path in (out, whole)]
    assert sorted(lines[0]) == sorted(lines[1])
    assert names(out) == names(whole)


@slow
@pytest.mark.skipif(os.name == "nt", reason="kills itself by a POSIX signal")
def test_a_run_killed_before_its_figures_draws_them(start, tmp_path):
    ended(start(tmp_path, dies_at=("open", "curves.png", 1)), -9)
    assert not (tmp_path / "report.html").exists()
    text, errors = ended(start(tmp_path, "--resume"))
    assert f"This run is finished: its results are in {tmp_path}." in text
    assert errors == ""  # nothing was trained
    assert {"bars.png", "curves.png", "report.html"} <= {*names(tmp_path)}
