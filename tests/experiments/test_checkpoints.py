"""Runs that stop and go on: to the last bit as if they had not, or refused with the reason."""

import json
import pickle
import re
import shutil
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tasks

from sam_optax.__main__ import main
from sam_optax.experiments import comparison
from sam_optax.experiments.data.dataset import from_arrays
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.reporting import archive, results
from sam_optax.experiments.training import identity
from sam_optax.experiments.training.checkpoints import Checkpoints
from sam_optax.experiments.training.train import work

slow = pytest.mark.slow
pytestmark = pytest.mark.usefixtures("compile_fast")


def refused(found, *parts):
    code, table, errors = found
    assert (code, table) == (2, "")
    for part in ("sam_optax: ", *parts):
        assert part in errors.splitlines()[-1]


# What the command does with what it finds in the directory of an earlier run.


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out [ünï] $y"


@pytest.fixture
def command(archive, out, tmp_path, capsys, monkeypatch):
    """Runs the command without figures; returns its exit code and what it printed."""
    monkeypatch.setattr(comparison, "_draw", lambda out, found: (out / "report.html").touch())
    data = shutil.copy(archive, tmp_path / "ünï \udcff $x.npz")
    given = ["--dataset", f"npz:{data}", "--out", str(out)]
    options = "--batch-size 20 --epochs 5 --sam.rho 0.5"  # of its own: there is no note about it

    def run(*more):
        methods = () if "--methods" in more else ("--methods", "sgd", "sam")
        code = main(["compare", *options.split(), *methods, *given, *more])
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
    return out / "checkpoint.npz"


def test_a_run_is_lost_to_no_new_one_goes_on_and_is_finished(interrupted, command, trainer, out):
    """And the directory of an earlier version's checkpoints, or of others, stays (case 77)."""
    before = interrupted.read_bytes()
    for more in ((), ("--checkpoint-every", "1")):
        refused(command(*more), f"{interrupted} is the checkpoint of an unfinished run; add --resu")
    assert (interrupted.read_bytes(), trainer.began_at) == (before, [])
    (out / "checkpoint").mkdir()
    (out / "checkpoint" / "my_model.pt").write_text("mine")
    code, table, errors = command("--resume")
    assert (code, errors, trainer.began_at, interrupted.exists()) == (0, "", [2], False)
    code, again, errors = command("--resume", "--checkpoint-every", "1")
    assert (code, errors, trainer.began_at) == (0, "", [2])
    assert (out / "checkpoint" / "my_model.pt").read_text() == "mine"
    assert again == table.replace("The results are", "This run is finished: its results are")
    shutil.rmtree(out)
    trainer.interrupt_after = 0
    begin = f"There is no checkpoint in {out}: starting from the beginning."
    assert command("--resume")[::2] == (130, f"{begin}\nsam_optax: interrupted.\n")
    assert not out.exists()


def test_what_is_no_checkpoint_of_ours_is_refused_and_stays(interrupted, command, trainer):
    for write, told in (
        (lambda file: file.write(b"mine"), "is damaged (File is not a zip file); remove it, and "),
        (lambda file: np.savez(file, w=1), "describes no run of this version (KeyError: 'record')"),
    ):
        with interrupted.open("wb") as file:
            write(file)
        before = interrupted.read_bytes()
        refused(command("--resume"), f"{interrupted}: {told}")
        refused(command(), f"--out: {interrupted} is the checkpoint of an unfinished run")
        assert (interrupted.read_bytes(), trainer.began_at) == (before, [])


def test_other_versions_of_libraries_are_told(interrupted, command, monkeypatch):
    versions = results.versions()
    monkeypatch.setattr(results, "versions", lambda: {**versions, "jax": "99.9", "new": "2"})
    told = f"with jax {versions['jax']} (now 99.9), new None (now 2): the numbers may differ"
    assert told in command("--resume")[2]


def test_a_full_disk_is_told_and_leaves_the_previous_checkpoint(interrupted, command, trainer, out):
    resource, checkpoint = pytest.importorskip("resource"), interrupted.read_bytes()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    trainer.interrupt_after = 4
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        told = command("--resume", "--checkpoint-every", "2")[2].splitlines()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    there = f"sam_optax: --out {out}: cannot be written to (file too large); "
    assert told == [f"{there}fix the cause; --resume will continue from epoch 2."]
    assert (interrupted.read_bytes(), len(list(out.iterdir()))) == (checkpoint, 2)


@pytest.mark.parametrize(
    "content", ["{}", '{"identity": {"data": ', '{"study": "optuna", "trials": []}', "[1]"]
)
def test_a_search_that_is_damaged_or_of_another_tool_is_refused(command, trainer, out, content):
    out.mkdir()
    (out / ".sam_optax").touch()
    (out / "tune.json").write_text(content)
    for more in ((), ("--resume",)):
        refused(command("--tune", "--trials", "9", *more), f"{out}/tune.json is damaged, or of an")
    assert command()[0] == 0
    assert (out / "tune.json").read_text() == content
    (out / "tune.json").write_text('{"identity": {}}')
    refused(command("--tune", "--resume"), f"{out}/tune.json: describes no run of this version (K")


def test_the_run_must_be_the_same_and_its_data_may_lie_elsewhere(
    interrupted, command, trainer, arrays, tmp_path
):
    np.savez(tmp_path / "elsewhere.npz", **arrays)
    np.savez(tmp_path / "changed.npz", **{**arrays, "y_train": arrays["y_train"][::-1]})
    refused(
        command("--resume", "--lr", "0.2", "--sam.rho", "0.25", "--seeds", "4"),
        f"--resume: {interrupted} is of a run with other settings: --seeds 5 (now 4), --lr 0.1 "
        "(now 0.2), --sam.rho 0.5 (now 0.25). Give the same ones, or choose another --out.",
    )
    for option, value, difference in (
        ("--methods", "sam", "--methods sgd sam (now sam)"),
        ("--momentum", "0.5", "--momentum 0.9 (now 0.5)"),
        ("--dataset", f"npz:{tmp_path}/changed.npz", "changed.npz)"),
    ):
        assert difference in command("--resume", option, value)[2]
    assert trainer.began_at == []
    assert command("--resume", "--dataset", f"npz:{tmp_path}/elsewhere.npz")[0] == 0


def test_the_results_of_another_run_are_not_taken_for_this_one(command, trainer, out):
    assert command()[0] == 0
    before, params = (out / "results.json").read_bytes(), {"sgd": {0: {"params": {"w": 1}}}}
    (out / "params.npz").write_bytes(archive.to_npz(params, RUN))
    refused(command("--resume"), f"{out}/params.npz: is of another run than results.json; train")
    theirs = f"{out} holds the results of a run with other settings: --momentum 0.9 (now 0.5). "
    refused(command("--resume", "--momentum", "0.5"), theirs)
    assert (out / "results.json").read_bytes() == before
    earlier = re.sub(rb'("image_size": {\s+"value": )null', rb"\g<1>224", before)
    (out / "results.json").write_bytes(earlier)  # as versions before this one had it
    theirs = identity.of(results.from_json(out / "results.json"))
    (out / "params.npz").write_bytes(archive.to_npz(params, theirs))
    assert command("--resume")[0] == 0
    (out / "results.json").write_bytes(before[:-9])
    refused(
        command("--resume"), f"--resume: {out}/results.json is damaged, or of another program; "
    )
    (out / "results.json").write_bytes(before.replace(b'"hyperparameters"', b'"of another"'))
    refused(command("--resume"), "(KeyError: 'hyperparameters'); restore the file, or train again")
    trainer.interrupt_after = 4
    assert command("--momentum", "0.5", "--checkpoint-every", "4")[0] == 130
    trainer.interrupt_after = None
    assert command("--momentum", "0.5", "--resume")[0] == 0  # counts more than older results
    assert trainer.began_at == [0, 0, 4]


# The checkpoint itself.


class Stopping(Checkpoints):
    """Those of a run, which stops after the checkpoint of the epoch ``last``."""

    def save(self, epoch, record, arrays):
        super().save(epoch, record, arrays)
        if epoch == self.last:
            raise InterruptedError


RUN = {"data": ["digits", "0123"], "methods": {"fsam": {"epochs": 9}}}
STATE = {"sam": [jnp.ones((2, 3)), jnp.full(3, 0.1, jnp.bfloat16), jax.random.key(2)]}
RECORD = {"sam": {"curve": [{"train_loss": [float("nan"), 1.0]}]}}


def stored(path, last=0):
    store = Stopping(path, 1, RUN)
    store.last = last
    store.find(resume=True)
    return store


def test_records_and_arrays_come_back_as_they_were_and_into_no_other_state(tmp_path):
    stored(tmp_path).save(3, RECORD, STATE)
    record, found = stored(tmp_path).restore(jax.device_put(STATE, jax.devices()[1]))
    assert repr((record, found)) == repr((RECORD, STATE))  # NaN is NaN
    with np.load(tmp_path / "checkpoint.npz") as file:
        members = [*file.items()]
    np.savez(tmp_path / "checkpoint.npz", **dict(members[::-1]))  # as other tools may order them
    assert repr(stored(tmp_path).restore(STATE)) == repr((RECORD, STATE))
    assert [of.devices() for of in found["sam"]] == 3 * [{jax.devices()[1]}]
    first, *others = STATE["sam"]
    for like in ([first[:, :2], *others], [first.astype(int), *others], [*STATE["sam"], first], []):
        with pytest.raises(UserError, match=r"npz: describes no run of this version \(ValueError"):
            stored(tmp_path).restore({"sam": like})
    record = np.frombuffer(json.dumps({"identity": RUN}).encode(), np.uint8)
    np.savez(tmp_path / "checkpoint.npz", record=record)
    with pytest.raises(
        UserError, match=r"npz: describes no run of this version \(KeyError: 'epoch'"
    ):
        stored(tmp_path)


def test_a_flipped_bit_anywhere_is_found_or_changes_nothing(tmp_path):
    """One more bit in the length of an entry of the directory may take it to the end of another."""
    store, params = stored(tmp_path), tmp_path / "params.npz"
    store.save(3, RECORD, STATE)
    networks = {"sgd": {seed: {"params": {"w": np.ones(5000, bool)}} for seed in range(2)}}
    params.write_bytes(archive.to_npz(networks, {}))
    for path, flipped, read in (
        (store.path, range(-7000, 7000, 11), lambda: repr(stored(tmp_path).restore(STATE))),
        (params, range(-2400, 2400), lambda: pickle.dumps(archive.load_params(params))),
    ):
        written, expected, found = path.read_bytes(), read(), 0
        for bit in flipped:
            content = bytearray(written)
            content[bit // 8] ^= 1 << bit % 8
            path.write_bytes(content)
            try:
                assert read() == expected
            except UserError:
                found += 1
        assert found > len(flipped) / 2


def test_interrupts_and_too_little_memory_remain_what_they_are(monkeypatch, tmp_path):
    opened, error, path, kept = zipfile.ZipFile.open, KeyboardInterrupt, tmp_path / "w.npz", []
    path.write_bytes(archive.to_npz({"w": np.ones(2)}, {}))

    def failing(*args, **options):
        kept.append(opened(*args, **options))
        raise error

    monkeypatch.setattr(zipfile.ZipFile, "open", failing)
    with pytest.raises(KeyboardInterrupt):
        archive.to_npz({"w": np.ones(2)}, {})
    error = MemoryError
    with pytest.raises(MemoryError):
        archive.read(path)


# Trainings that stop and go on.


IMAGES = {"epochs": 3, "crop": 1}
TASKS = {
    "vectors": (("rsam", "fsam"), {"batch_size": 12, "epochs": 4, "seeds": 2, "label_noise": 0.2}),
    "images": (
        ("esam",),
        {**IMAGES, "mixup": 0.3, "count": 2, "model": tasks.Flat(dtype=jnp.bfloat16)},
    ),
    "a batch in the state": (("sampa",), {**IMAGES, "count": 2, "seeds": 2}),
}


@slow
@pytest.mark.parametrize("name", TASKS)
def test_stopping_and_going_on_changes_no_bit(name, data, tmp_path):
    simple, (methods, settings) = name == "vectors", TASKS[name]
    dataset = from_arrays(**data) if simple else tasks.images()
    task = tasks.make(dataset, *methods, **settings)
    options = {"count": settings.get("count", 1)}
    straight = tasks.run(task, **options)
    for last in (1, settings["epochs"]) if simple else (2,):
        store = stored(tmp_path, last)
        with pytest.raises(InterruptedError):
            tasks.run(task, checkpoints=store, **options)
    store, listener = stored(tmp_path), tasks.Silent()
    assert store.epoch == last
    resumed = tasks.run(task, listener=listener, checkpoints=store, **options)
    assert listener.pieces == {k: pytest.approx(n) for k, (_, n) in work(task, last).items() if n}
    for method, outcome in resumed.items():
        expected = straight[method]
        jax.tree.map(np.testing.assert_array_equal, outcome.variables, expected.variables)
        assert outcome.curves.keys() == expected.curves.keys()
        for key, values in outcome.curves.items():
            np.testing.assert_array_equal(values, expected.curves[key], strict=True)
        np.testing.assert_array_equal(outcome.sharpness, expected.sharpness)
        assert len(outcome.seconds) == settings["epochs"]  # what was measured before counts
