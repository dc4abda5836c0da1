"""What the command does with what it finds in the directory of an earlier run."""

import json

import numpy as np
import pytest

from sam_optax.__main__ import main
from sam_optax.experiments import checkpoint_file, results, training
from sam_optax.experiments.snapshots import Snapshot

EPOCHS = 5


class Training:
    """In the place of the training: finishes, or saves a checkpoint and is interrupted."""

    def __init__(self):
        self.interrupt_after = None
        self.began_at = []

    def __call__(self, task, chosen, listener, checkpoints=None, watch=False):
        self.began_at.append(checkpoints.epoch)
        if self.interrupt_after is not None:
            if self.interrupt_after:
                checkpoints.save(Snapshot(self.interrupt_after, {}, {"w": np.ones(3)}))
            raise KeyboardInterrupt
        curve = np.ones((task.epochs, len(task.seeds)), np.float32)
        return {
            name: training.Outcome(
                dict(variant.hyperparameters),
                {"w": curve.T},
                train_loss=curve,
                test_accuracy=curve,
                sharpness=curve[0],
                watched={},
                seconds=[1.0],
                cost=1.0,
            )
            for name, variant in chosen.items()
        }


@pytest.fixture
def trained(monkeypatch):
    fake = Training()
    monkeypatch.setattr(training, "train", fake)
    return fake


@pytest.fixture
def command(archive, tmp_path, capsys):
    """Runs the command; returns its exit code and what it printed."""
    capsys.readouterr()

    def run(*more):
        out = tmp_path / "out"
        options = f"--dataset npz:{archive} --batch-size 20 --epochs {EPOCHS} --methods sgd sam"
        code = main(["compare", *options.split(), "--out", str(out), *more])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.fixture
def interrupted(trained, command, tmp_path):
    """A run that was interrupted after a checkpoint; the path of that."""
    trained.interrupt_after = 2
    code, _, errors = command("--checkpoint-every", "2")
    assert code == 130
    assert errors.splitlines()[-2:] == [
        "After epoch 2 there is a checkpoint; --resume continues from it.",
        "sam_optax: interrupted.",
    ]
    trained.interrupt_after = None
    trained.began_at.clear()
    return tmp_path / "out" / "checkpoint.msgpack"


def test_an_unfinished_run_is_not_lost_to_a_new_one(interrupted, command, trained):
    before = interrupted.read_bytes()
    for more in ((), ("--checkpoint-every", "1")):
        code, out, errors = command(*more)
        assert (code, out) == (2, "")
        assert errors == (
            f"sam_optax: --out: {interrupted} is the checkpoint of an unfinished run; add --resume "
            "to continue that run, remove the file to start again, or choose another directory.\n"
        )
    assert interrupted.read_bytes() == before
    assert trained.began_at == []


def test_a_resumed_run_continues_and_then_is_finished(interrupted, command, trained):
    code, table, errors = command("--resume")
    assert (code, errors) == (0, "")
    assert trained.began_at == [2]
    assert not interrupted.exists()
    settings = json.loads((interrupted.parent / "results.json").read_text())["settings"]
    assert settings.keys().isdisjoint({"resume", "checkpoint_every", "out"})

    code, again, errors = command("--resume", "--checkpoint-every", "1")
    assert (code, errors) == (0, "")
    assert trained.began_at == [2]
    assert again.splitlines()[:-1] == table.splitlines()[:-1]
    assert (
        again.splitlines()[-1] == f"This run is finished: its results are in {interrupted.parent}."
    )


def test_the_settings_must_be_the_same(interrupted, command, trained):
    more = ("--lr", "0.2", "--sam.rho", "0.25", "--fsam.rho", "3", "--seeds", "4")
    code, out, errors = command("--resume", *more)
    assert (code, out) == (2, "")
    assert errors == (
        f"sam_optax: --resume: {interrupted} is of a run with other settings: --seeds 5 (now 4), "
        "--lr 0.1 (now 0.2), --sam.rho 0.5 (now 0.25). Give the same ones, choose another --out, "
        "or remove the file to start again.\n"
    )
    assert command("--resume", "--methods", "sgd", "--label-noise", "0")[2].count("(now ") == 2
    assert trained.began_at == []
    assert command("--resume", "--fsam.rho", "3")[0] == 0  # F-SAM is not trained


def test_the_data_must_be_the_same(interrupted, command, arrays, tmp_path):
    np.savez(tmp_path / "elsewhere.npz", **arrays)
    changed = {**arrays, "y_train": arrays["y_train"][::-1]}
    np.savez(tmp_path / "changed.npz", **changed)
    code, _, errors = command("--resume", "--dataset", f"npz:{tmp_path / 'changed.npz'}")
    assert code == 2
    assert "changed.npz)" in errors
    assert command("--resume", "--dataset", f"npz:{tmp_path / 'elsewhere.npz'}")[0] == 0


def test_the_results_of_another_run_are_not_taken_for_this_one(command, trained, tmp_path):
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
    assert trained.began_at == [0, 0]


def test_a_checkpoint_counts_more_than_older_results(command, trained, tmp_path):
    assert command()[0] == 0
    trained.interrupt_after = 4
    assert command("--checkpoint-every", "4")[0] == 130
    trained.interrupt_after = None
    assert command("--resume")[0] == 0
    assert trained.began_at == [0, 0, 4]


@pytest.mark.parametrize("content", [None, "", "[]", '{"format": "sam_optax.compare"}'])
def test_with_nothing_to_resume_it_starts_from_the_beginning(command, trained, tmp_path, content):
    if content is not None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "results.json").write_text(content)
    code, _, errors = command("--resume", "--checkpoint-every", "2")
    assert code == 0
    assert errors == f"There is no checkpoint in {tmp_path / 'out'}: starting from the beginning.\n"
    assert trained.began_at == [0]


def test_an_interrupt_before_the_first_checkpoint_leaves_nothing(command, trained, tmp_path):
    trained.interrupt_after = 0
    code, _, errors = command("--checkpoint-every", "2")
    assert (code, errors) == (130, "sam_optax: interrupted.\n")
    assert list(tmp_path.iterdir()) == []


def test_a_note_of_other_versions_is_on_standard_error(interrupted, command):
    run, arrays = checkpoint_file.decode(interrupted.read_bytes())
    run["versions"]["optax"] = "0.0"
    interrupted.write_bytes(checkpoint_file.encode(run, arrays))
    code, _, errors = command("--resume")
    assert code == 0
    assert errors.startswith("The checkpoint was written with optax 0.0 (now ")


def test_an_interrupt_while_writing_the_results_keeps_the_checkpoint(
    interrupted, command, monkeypatch
):
    def interrupt(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(results, "to_csv", interrupt)
    code, _, errors = command("--resume")
    assert code == 130
    assert errors.startswith("After epoch 2 there is a checkpoint; --resume continues from it.")
    assert [path.name for path in interrupted.parent.iterdir()] == ["checkpoint.msgpack"]
