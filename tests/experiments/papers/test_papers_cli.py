"""``python -m sam_optax train``: what it prints, writes and returns."""

import json
import os
import re
import shutil
import struct

import archives
import pytest

from sam_optax.__main__ import main
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.output import OutputDirectory
from sam_optax.experiments.papers import example, outcome, records, saved
from sam_optax.experiments.papers.metrics import Metrics

FILES = {"metrics.jsonl", "params.msgpack", "report.html", "results.json"}


def small(images, *more):
    return [
        *("train", "--dataset", f"tfds:{images}", "--model", "flat", "--batch-size", "16"),
        *("--devices", "1", "--method", "rsam", "--cutout", "3"),
        *("--epochs", "2", "--sharpness-examples", "0", *more),
    ]


@pytest.mark.slow
def test_a_preset_on_its_data(tmp_path, capsys):
    """From the published archive to the report, with a network of the papers' kind."""
    path = archives.to_tar(archives.python(10), tmp_path, "cifar-10-python")
    out = tmp_path / "out"
    arguments = [
        *("train", "--preset", "fsam-cifar10", "--dataset", f"cifar10:{path}", "--model", "tiny"),
        *("--devices", "1", "--batch-size", "2", "--m", "1", "--scale", "0.6"),
        *("--epochs", "3", "--out", str(out), "--tensorboard", "--sharpness-examples", "4"),
    ]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert re.search(r"F-SAM: tiny on cifar10 \(5,266 params\)\ntest accuracy +\d", printed.out)
    assert re.search("Not printed in the paper, chosen here: .*cutout 16", printed.err)
    assert "Scaled down (--scale 0.6): 2 of 3 epochs; 12 of 20 training examples" in printed.err
    assert re.search(r"epoch 1/2, [\d,.]+ images/s, \d+:\d\d left", printed.err)

    assert {p.name for p in out.iterdir() if "tfevents" not in p.name} == FILES
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2]
    found = json.loads((out / "results.json").read_text())
    assert found["points"] == lines
    assert found["settings"]["rho"] == {"value": 0.1, "source": "F-SAM, supplement A5.1"}
    assert found["settings"]["m"] == {"value": 1, "source": "given"}
    assert found["settings"]["image_size"] == {"value": 32, "source": "the data's"}

    report = (out / "report.html").read_text()
    for text in (
        "<td>lr</td><td>0.05</td><td>F-SAM, supplement A5.1</td>",
        "<td>sigma</td><td>1</td><td>not printed; chosen here</td>",
        "<td>model</td><td>tiny</td><td>given; the paper&#x27;s is resnet18</td>",
        "<b>Scaled down</b> (--scale 0.6): 2 of 3 epochs",
        "their sizes are not",
        "<td>m</td><td>1</td><td>given</td>",
        "<td>gradients a step</td><td>2 on each of 2 groups</td>",
        "with one group of 2 (the compiler&#x27;s count)",
        "<td>images a second</td>",
        "<td>sharpness L(w + ε) − L(w)</td>",
    ):
        assert text in report
    assert not re.search(r'(src|href)="(?!data:)', report)  # it needs nothing else

    (events,) = out.glob("events.out.tfevents.*")
    places = records.index(events)
    assert len(places) == 3
    assert records.read(events, *places[0])[9:] == b"\x1a\x0dbrain.Event:2"
    fields = dict(example._fields(records.read(events, *places[2])))
    assert fields[2] == lines[1]["step"]
    values = {}
    for _, value in example._fields(fields[5]):
        tag_and_number = dict(example._fields(value))
        values[tag_and_number[1].decode()] = struct.unpack("<f", tag_and_number[2])[0]
    assert values["test_loss"] == pytest.approx(lines[1]["test_loss"])
    assert set(values) == set(lines[0]) - {"epoch", "step"}


def interrupt(monkeypatch):
    """Interrupts the process when it has written a checkpoint."""
    write = OutputDirectory.write

    def write_and_stop(self, files):
        write(self, files)
        if saved.NAME in files:
            raise KeyboardInterrupt

    monkeypatch.setattr(OutputDirectory, "write", write_and_stop)


@pytest.mark.slow
def test_resuming_gives_the_params_of_an_uninterrupted_run(images, tmp_path, capsys, monkeypatch):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert main(small(images, "--out", str(whole))) == 0
    with monkeypatch.context() as patched:
        interrupt(patched)
        assert main(small(images, "--out", str(broken))) == 130
    assert {p.name for p in broken.iterdir()} == {"metrics.jsonl", saved.NAME}
    capsys.readouterr()

    assert main(small(images, "--out", str(broken))) == 2
    assert "is the checkpoint of an unfinished run; add --resume" in capsys.readouterr().err
    assert main(small(images, "--out", str(broken), "--resume", "--lr", "0.2")) == 2
    assert "other settings: --lr 0.1 (now 0.2)" in capsys.readouterr().err
    assert main(small(images, "--out", str(broken), "--resume", "--m", "8")) == 2
    assert "other settings: --m 16 (now 8)" in capsys.readouterr().err

    assert main(small(images, "--out", str(broken), "--resume")) == 0
    names = {p.name for p in broken.iterdir()}
    assert names == FILES
    params = [(path / "params.msgpack").read_bytes() for path in (whole, broken)]
    assert params[0] == params[1]
    results = [json.loads((path / "results.json").read_text()) for path in (whole, broken)]
    for a, b in zip(*(r["points"] for r in results), strict=True):
        assert {k: v for k, v in a.items() if "second" not in k} == {
            k: v for k, v in b.items() if "second" not in k
        }
    assert len((broken / "metrics.jsonl").read_text().splitlines()) == 2

    capsys.readouterr()
    assert main(small(images, "--out", str(broken), "--resume")) == 0
    assert "This run is finished" in capsys.readouterr().out
    assert main(small(images, "--out", str(broken), "--resume", "--seed", "1")) == 2
    assert "holds the results of a run with other settings: --seed 0" in capsys.readouterr().err


def test_a_damaged_checkpoint(images, tmp_path, capsys):
    (tmp_path / saved.NAME).write_bytes(b"nonsense")
    assert main(small(images, "--out", str(tmp_path), "--resume")) == 2
    message = capsys.readouterr().err
    assert "cannot be used: it is damaged" in message
    assert "Remove it to start again" in message


def test_what_cannot_be_printed_is_written(images, tmp_path, monkeypatch):
    """As into ``| head``: a closed pipe ends the process."""

    def close(*args):
        raise SystemExit(1)

    monkeypatch.setattr(outcome, "show", close)
    with pytest.raises(SystemExit):
        main(small(images, "--out", str(tmp_path)))
    assert {p.name for p in tmp_path.iterdir()} == FILES


def test_what_cannot_be_written_is_printed(images, tmp_path, capsys):
    (tmp_path / "report.html").mkdir()
    assert main(small(images, "--out", str(tmp_path))) == 2
    printed = capsys.readouterr()
    assert "test accuracy" in printed.out
    assert "cannot be written to" in printed.err
    assert (tmp_path / saved.NAME).exists()


def test_a_sharpness_that_is_not_finite(images, tmp_path, capsys):
    more = ("--sharpness-examples", "8", "--sharpness-rho", "1e38", "--out", str(tmp_path))
    assert main(small(images, *more)) == 0
    text = "not finite at ρ 1e+38, on 8 training examples"
    assert text in capsys.readouterr().out
    assert text in (tmp_path / "report.html").read_text()

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    found = json.loads((tmp_path / "results.json").read_text(), parse_constant=refuse)
    assert found["sharpness"]["value"] is None


def test_a_training_that_diverges_in_its_last_step(images, tmp_path, capsys):
    """The training loss is that before the step, and does not tell."""
    more = ("--batch-size", "48", "--epochs", "1", "--lr", "1e38", "--momentum", "0")
    assert main(small(images, *more, "--optimizer", "adamw", "--out", str(tmp_path))) == 2
    assert "The test loss is nan in epoch 1: the training has diverged" in capsys.readouterr().err
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""  # nan is not JSON


@pytest.mark.parametrize("content", ["{", "[]", '{"format": "sam_optax.compare"}'])
def test_results_of_something_else_are_no_finished_run(content, images, tmp_path):
    (tmp_path / "results.json").write_text(content)
    assert main(small(images, "--out", str(tmp_path), "--resume")) == 0
    assert json.loads((tmp_path / "results.json").read_text())["title"] == "R-SAM: flat on bright"


def test_paths_that_are_relative_or_no_text(images, tmp_path, monkeypatch):
    odd = tmp_path / "ünï \udcff & <b>"
    shutil.copytree(images.parent, odd)
    monkeypatch.chdir(odd)
    arguments = small(odd / images.name, "--out", str(tmp_path / "out"))
    assert main(arguments) == 0
    report = (tmp_path / "out" / "report.html").read_text()
    assert "ünï ? &amp; &lt;b&gt;/1.0.0</td>" in report
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found["settings"]["dataset"]["value"] == f"tfds:{odd / images.name}"

    os.rename(odd, tmp_path / "bright")
    assert main(small(images.name, "--out", str(tmp_path / "again"))) == 0
    found = json.loads((tmp_path / "again" / "results.json").read_text())
    assert found["title"] == "R-SAM: flat on bright"


@pytest.mark.slow
def test_a_full_disk_in_the_middle(tmp_path):
    metrics = Metrics(tmp_path, tensorboard=False)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match=r"--out: .*metrics.jsonl cannot be written \(is a dir"):
        metrics.add({"epoch": 1})


WRONG = {
    "dtype": (["--dtype", "float8"], "--dtype float8: use one of float32, bfloat16"),
    "resume": (["--resume"], "--resume: needs --out DIR"),
    "tensorboard": (["--tensorboard"], "--tensorboard: needs --out DIR"),
    "checkpoints": (["--checkpoint-every", "-1"], "--checkpoint-every -1: use a number of at"),
    "scale": (["--scale", "2"], r"--scale 2: use a number in \(0, 1\]"),
    "size": (["--image-size", "64"], "--image-size 64: the images of .* all have 8 pixels"),
    "patches": (["--model", "vit_s16"], "images of 8×8 cannot be cut into patches"),
    "radius": (["--rho", "-1"], "--method rsam: rho must be in"),
    "seed": (["--seed", str(2**31)], r"--seed 2147483648: use a number below 2\^31"),
    "sharpness": (["--sharpness-rho", "inf"], "--sharpness-rho inf: use a number of at least 0"),
    "preset": (["--preset", "x"], "--preset x: unknown preset"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG)
def test_mistakes_are_one_line(arguments, message, images, capsys):
    assert main(small(images, *arguments)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.search(message, printed.err.splitlines()[-1])


def test_help_names_presets_and_networks(capsys):
    assert main(["train", "--help"]) == 0
    text = " ".join(re.sub(r"[│╭╮╰╯]", " ", capsys.readouterr().out).split())
    for name in (
        "asam-cifar10",
        "rsam-vit-s16",
        "wrn28_10",
        "--label-noise",
        "--rho",
        "share one perturbation",
    ):
        assert name in text
