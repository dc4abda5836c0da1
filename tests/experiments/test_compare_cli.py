"""The command line: what it prints, writes and returns."""

import csv
import json
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

from sam_optax.__main__ import main
from sam_optax.experiments import compare, results, training

FILES = {"results.json", "results.csv", "curves.png", "bars.png", "steps.png", "params.npz"}


def small(archive, *more):
    return ["compare", "--dataset", f"npz:{archive}", "--batch-size", "20", "--epochs", "2", *more]


WRONG = {
    "epochs": (["--epochs", "0"], "--epochs 0: use an integer of at least 1."),
    "seeds": (["--seeds", "0"], "--seeds 0: use an integer of at least 1."),
    "seed offset": (["--seed-offset", "-1"], "--seed-offset -1: use an integer of at least 0."),
    "late seeds": (["--seed-offset", str(2**31)], "--seed-offset .*below 2"),
    "batch size": (["--batch-size", "0"], "--batch-size 0: use an integer of at least 1."),
    "large batch": (["--batch-size", "1438"], "--batch-size 1438: digits has 1437 .*at most"),
    "noise": (["--label-noise", "1"], r"--label-noise 1: use a number in \[0, 1\)."),
    "negative noise": (["--label-noise", "-.1"], r"--label-noise -0.1: use a number in \[0, 1\)."),
    "no number": (["--label-noise", "nan"], "--label-noise nan: use a number"),
    "rate": (["--lr", "0"], "--lr 0: use a number above 0."),
    "infinite rate": (["--lr", "inf"], "--lr inf: use a number above 0."),
    "momentum": (["--momentum", "1"], r"--momentum 1: use a number in \[0, 1\)."),
    "decay": (["--weight-decay", "-1"], "--weight-decay -1: use a number of at least 0."),
    "sharpness": (["--sharpness-rho", "0"], "--sharpness-rho 0: use a number above 0."),
    "rho": (["--sam.rho", "-1"], r"--sam.rho must be in \[0, inf\), got -1.0."),
    "rho of a method left out": (["--methods", "sgd", "--asam.rho", "nan"], "--asam.rho must"),
    "eta": (["--asam.eta", "-1"], "--asam.eta must be in"),
    "gamma": (["--rsam.gamma", "-1"], "--rsam.gamma must be in"),
    "lmbda": (["--fsam.lmbda", "1"], r"--fsam.lmbda must be in \[0, 1\), got 1.0."),
    "method": (["--methods", "sgd", "adam"], "--methods adam: unknown method; .* sgd, sam, asam"),
    "same method": (["--methods", "sam", "sam"], "--methods sam: given twice"),
    "no method": (["--methods"], "--methods: none given"),
    "model": (["--model", "vit"], "--model vit: unknown model; use one of mlp, cnn."),
    "dataset": (["--dataset", "cifar"], "--dataset cifar: unknown data set; use one of digits"),
    "file": (["--dataset", "npz:nowhere"], "--dataset npz:nowhere: there is no such file"),
    "out": (["--out", "/proc/here"], "--out /proc/here: cannot be written to .*choose another"),
    "checkpoints": (["--checkpoint-every", "-1"], "--checkpoint-every -1: use an integer of at l"),
    "checkpoints nowhere": (["--checkpoint-every", "5"], "--checkpoint-every 5: needs --out DIR"),
    "resuming nowhere": (["--resume"], "--resume: needs --out DIR"),
    "no integer": (["--epochs", "many"], ".*--epochs.*many.*see python -m sam_optax compare --h"),
    "no option": (["--epoch", "3"], ".*--epoch.*see python -m sam_optax compare --help"),
    "no value": (["--epochs"], ".*--epochs.*see python -m sam_optax compare --help"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG)
def test_a_mistake_is_one_line_and_exit_code_2(capsys, monkeypatch, arguments, message):
    def train(*args):
        pytest.fail("started to train")

    monkeypatch.setattr(training, "train", train)
    assert main(["compare", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert re.match(f"sam_optax: {message}", printed.err)


def test_vectors_are_no_images(capsys, archive):
    assert main(small(archive, "--model", "cnn")) == 2
    assert "--model cnn: the examples are vectors" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_without_a_command_it_lists_the_commands(capsys, arguments):
    assert main(arguments) == 0
    assert re.search(r"compare .*\n *bench ", capsys.readouterr().out)


def test_an_unknown_command(capsys):
    assert main(["tune"]) == 2
    assert capsys.readouterr().err.startswith("sam_optax: tune: unknown command; use one of com")


def test_help_lists_every_option(capsys):
    assert main(["compare", "--help"]) == 0
    text = capsys.readouterr().out
    for option in ("--dataset", "--methods", "--label-noise", "--out", "--resume", "--rsam.gamma"):
        assert option in text


@pytest.fixture(scope="module")
def run(archive, tmp_path_factory):
    """One real process with two methods, of which one diverges: radius 1e30."""
    out = tmp_path_factory.mktemp("run") / "new" / "results"
    arguments = small(archive, "--methods", "sgd", "sam", "--sam.rho", "1e30", "--seeds", "2")
    command = [sys.executable, "-m", "sam_optax", *arguments, "--out", str(out)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300), out


@pytest.mark.slow
def test_the_table_is_on_standard_output_and_the_progress_on_standard_error(run):
    process, out = run
    assert process.returncode == 0, process.stderr
    assert re.search(r"^sgd .*\d\d\.\d\d ± \d+\.\d\d +\d\.\d{3} ", process.stdout, re.M)
    assert re.search(r"^sam +ρ 1e\+30 +diverged +– +– +\d", process.stdout, re.M)
    assert "40 % of the training labels are wrong" in process.stdout
    assert f"The results are in {out}." in process.stdout
    assert re.match(r"compiling sgd \(1 of 4\)", process.stderr)
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", process.stdout + process.stderr)


@pytest.mark.slow
def test_the_files_hold_the_results(run):
    _, out = run
    assert {path.name for path in out.iterdir()} == FILES
    found = json.loads((out / "results.json").read_text())
    settings = found["settings"]
    assert (settings["epochs"], settings["batch_size"], settings["methods"]) == (
        2,
        20,
        ["sgd", "sam"],
    )
    assert [m["diverged"] for m in found["methods"]] == [0, 2]
    assert found["methods"][1]["hyperparameters"] == {"rho": 1e30}
    rows = list(csv.DictReader((out / "results.csv").read_text().splitlines()))
    assert [row["seed"] for row in rows] == ["0", "1", "0", "1"]
    for name in ("curves.png", "bars.png", "steps.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_params_are_those_of_the_results(run, archive):
    _, out = run
    params = results.load_params(out / "params.npz")["sgd"][1]
    with np.load(archive) as arrays:
        mean, std = arrays["x_train"].mean(0), arrays["x_train"].std(0)
        x, y = (arrays["x_test"] - mean) / std, arrays["y_test"]
    for name in ("Dense_0", "Dense_1", "Dense_2"):
        layer = params["params"][name]
        x = np.maximum(x, 0) if name != "Dense_0" else x
        x = x @ layer["kernel"] + layer["bias"]
    found = json.loads((out / "results.json").read_text())
    accuracy = found["methods"][0]["seeds"][1]["test_accuracy"]
    assert np.mean(x.argmax(1) == y) == pytest.approx(accuracy)


def test_what_cannot_be_printed_is_written(monkeypatch, archive, tmp_path):
    """As into ``| head``: a closed pipe ends the process."""

    def close(found):
        raise SystemExit(1)

    monkeypatch.setattr(compare, "_print", close)
    with pytest.raises(SystemExit):
        main(small(archive, "--out", str(tmp_path)))
    assert results.from_json(tmp_path / "results.json") is not None


@pytest.mark.parametrize("moment", ["training", "writing"])
def test_an_interrupt_leaves_nothing_behind(capsys, monkeypatch, archive, tmp_path, moment):
    def interrupt(*args, **options):
        raise KeyboardInterrupt

    if moment == "training":
        monkeypatch.setattr(training, "train", interrupt)
    else:
        found = {"settings": {"frontier": False}}
        monkeypatch.setattr(compare, "_train", lambda *args: ({}, found))
        monkeypatch.setattr(compare, "_print", lambda found: None)
        monkeypatch.setattr(results, "params_to_npz", lambda *args: b"")
        monkeypatch.setattr(results, "to_csv", interrupt)
        from sam_optax.experiments import plots

        for draw in ("curves", "bars", "steps"):
            monkeypatch.setattr(plots, draw, lambda *args: b"")
    assert main(small(archive, "--out", str(tmp_path / "new"))) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "sam_optax: interrupted."
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name == "nt", reason="sends a POSIX signal")
@pytest.mark.slow
def test_a_real_interrupt_in_the_middle_of_the_training(tmp_path):
    out = tmp_path / "new"
    command = [sys.executable, "-m", "sam_optax", "compare", "--methods", "sgd", "--epochs", "9999"]
    process = subprocess.Popen([*command, "--out", str(out)], stderr=subprocess.PIPE, text=True)
    with process:
        for line in process.stderr:
            if line.startswith("training"):
                break
        assert out.is_dir()
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=300)[1]
    assert process.returncode == 130
    assert rest.splitlines()[-1] == "sam_optax: interrupted."
    assert "Traceback" not in rest
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_process_leaves_without_a_shutdown(monkeypatch, capsys):
    """The interpreter's shutdown crashes, now and then, while a computation is running."""

    def interrupt(*args, **options):
        raise KeyboardInterrupt

    def leave(code):
        raise SystemExit(f"left with {code}")

    monkeypatch.setattr(training, "train", interrupt)
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(sys, "argv", ["sam_optax", "compare"])
    with pytest.raises(SystemExit, match="left with 130"):
        main()
    assert capsys.readouterr().err.splitlines()[-1] == "sam_optax: interrupted."


def test_a_missing_dependency_names_the_extra(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert main(["compare"]) == 2
    assert capsys.readouterr().err == (
        'sam_optax: tyro is not installed; run: pip install "sam_optax[experiments]"\n'
    )


def test_importing_the_library_imports_nothing_of_the_experiments():
    code = (
        "import sys, sam_optax, sam_optax.__main__; names = {m.partition('.')[0] for m in "
        "sys.modules} | set(sys.modules); print(sorted(names & {'flax', 'tyro', 'rich', "
        "'sklearn', 'mlxtend', 'matplotlib', 'scipy', 'sam_optax.experiments'}))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.stdout == "[]\n"
