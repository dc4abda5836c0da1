"""``compare`` at the command line: what they print, write and return."""

import dataclasses
import importlib
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tasks
from sklearn.datasets import load_digits

from sam_optax.__main__ import main
from sam_optax.experiments import comparison
from sam_optax.experiments.options.options import Compare
from sam_optax.experiments.reporting import results

PICTURES = {"curves.png", "cost.png", "report.html"}
RESULTS = {"results.json", "params.npz"}
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f]")


def small(archive, *more):
    options = ["--batch-size", "20", "--epochs", "2"]
    return ["compare", "--dataset", f"npz:{archive}", *options, *more]


def names(out):
    return {path.name for path in out.iterdir()} - {".sam_optax"}


# Mistakes.

WRONG = {
    # values
    "--epochs 0": r"--epochs 0: use an integer \(int\) of at least 1, below 2",
    "--label-noise 1": r"--label-noise 1: use a number in \[0, 1\)\.",
    "--schedule x": "--schedule x: unknown; use one of cosine, constant.",
    "--sam.rho -1": r"--sam.rho must be in \[0, inf\), got -1.0.",
    "--sam.rho 1 1": "--sam.rho 1 1: a value is given twice; give each once.",
    "--sam.rho": "--sam.rho: no value is given; give one or several.",
    "--gsam.alpha 1": "--gsam.alpha: gsam is not trained; add it to --methods",
    "--m 7": r"--m 7: does not divide the batch size, 100; use a divisor, as 5\.",
    # names
    "--methods adam": r"--methods adam: unknown; did you mean asam\? .*, given as FIL",
    "--methods sam sam": "--methods sam sam: a value is given twice",
    "--methods": "--methods: no value is given",
    "--model vit": "--model vit: unknown; use one of mlp, cnn. More are in notebooks/networks.py",
    "--dataset npz:nowhere": r"--dataset npz:nowhere: not a readable .npz file \(no such file",
    "--preset x": "--preset x: unknown; use one of asam-cifar10, ",
    "--help sma": "--help sma: unknown; did you mean sam?",
    # what does not go together
    f"--model {tasks.NETWORKS}:vit_s16": ".*: images of 8×8 cannot .*--image-size",
    "--label-column y": "--label-column y: needs --dataset hf:NAME_OR_PATH, not digits; leave",
    "--test-split y --dataset npz:a": "--test-split y: needs --dataset hf:NAME_OR_PATH, not npz:a",
    "--image-size 9": "--image-size 9: needs --dataset hf:NAME_OR_PATH",
    "--beta2 0.9": "--beta2 0.9: is for --optimizer adam and adamw; give 0.999.",
    "--optimizer adam --lr 1 --nesterov True": "--nesterov True: is for --optimizer sgd and rms",
    "--batch-size 1438": "--batch-size 1438: is more than the 1437 training",
    "--devices 99": "--devices 99: there are 8; use at most as many.",
    "--devices 8": "--batch-size 100: 8 devices share each batch; use a m",
    "--devices 8 --batch-size 64 --m 4": "--m 4: 8 devices share each group; use a multiple of 8",
    "--preset asam-cifar10": r"--preset asam-cifar10: needs the data \(cifar10\); give --dataset h",
    f"--preset asam-cifar10 --dataset digits --methods {tasks.FILE}:sam_noise": (
        f"--preset asam-cifar10: .* rho for {tasks.FILE}:sam_noise; give --sam-noise.rho"
    ),
    "--preset fsam-transfer --dataset digits": "--preset fsam-transfer: .* give --model FILE",
    "--resume": "--resume: needs --out DIR",
    "--trials 5": "--trials: needs --tune",
    "--tune-lr": "--tune-lr: needs --tune",
    "--tune --sam.rho 0.1 0.2": "--tune: --sam.rho 0.1 0.2: the search starts at one radius",
    "--tune --sam.rho 0": "--tune: --sam.rho 0: the search starts at one radius above 0",
    # what cannot be read
    "--epochs ten": "--epochs: use an INT, not ten. .see python -m sam_optax compare --help.",
    "--sam.rho 1 big": "--sam.rho: use a FLOAT, not big. ",
    "--nesterov maybe": "--nesterov: use True.False, not maybe. ",
    "--method sam": "--method: unknown option; did you mean --methods",
    "--sam.roh 1": "--sam.roh: unknown option; did you mean --sam.rho",
    "digits": "digits: unknown option; leave it out. ",
    "--epochs": "--epochs: expected one argument. ",
    "--out=": "--out: is empty; give a value, or leave it out. ",
    # what is for images; left out, crop and flip would be what a preset has
    "VECTORS --model cnn": "--model cnn: the examples are vectors .* use --model mlp",
    "VECTORS --crop 2": r"--crop 2: is for images, not examples of shape \(6,\); give 0",
    "VECTORS --flip True": "--flip True: is for images, .*; give False",
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.items(), ids=WRONG)
def test_a_mistake_is_one_line_and_exit_code_2(capsys, trainer, archive, arguments, message):
    data = f"--dataset npz:{archive} --batch-size 20"
    assert main(["compare", *arguments.replace("VECTORS", data).split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert re.match(f"sam_optax: {message}", printed.err)
    assert not trainer.began_at


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_without_a_command_it_lists_the_commands(capsys, arguments):
    assert main(arguments) == 0
    assert re.search(r"compare .*\n *cost .*\n", capsys.readouterr().out)


def test_commands_that_are_not_there(capsys):
    assert main(["tune"]) == 2
    message = "sam_optax: tune: unknown command; use one of compare, cost.\n"
    assert capsys.readouterr().err == message


def test_help_fits_two_screens_and_says_how_to_see_the_rest(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["compare", "--help"]) == 0
    short = capsys.readouterr().out
    assert len(short.splitlines()) < 80
    assert max(map(len, short.splitlines())) <= 80
    for part in ("--methods [METHOD", "--tune", "(default: 5)", "looksam", "examples:"):
        assert part in short
    assert "package.module" not in short
    assert main(["compare", "--help", "--tune"]) == 0  # which is no method
    assert capsys.readouterr().out == short
    assert main(["compare", "--help-all"]) == 0
    whole = capsys.readouterr().out
    for field in dataclasses.fields(Compare):
        assert field.name == "hyperparameters" or f"--{field.name.replace('_', '-')} " in whole
    for name in ("asam-cifar10", "fsam-cifar100", "mlp (two", "LookSAM"):
        assert name in whole
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["compare", "--help"]) == 0
    narrow, _, _ = capsys.readouterr().out.partition("examples:")
    assert max(map(len, narrow.splitlines())) <= 60


def test_the_help_of_a_method_lists_its_own_options(capsys):
    assert main(["compare", "--help", "rsam"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"--rsam.gamma \[FLOAT ...\] +Scale γ ", text)
    assert "(default: 0.1)" in " ".join(text.split())
    assert "--sam.rho" not in text


def test_the_other_command_has_one_help(capsys):
    assert main(["cost", "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: python -m sam_optax cost [options]")
    assert "--out" in text
    assert "(default: sam asam fsam rsam)" in " ".join(text.split())  # as they are typed


# What would be trained.


def test_a_dry_run_prints_every_setting_with_its_source_and_trains_nothing(
    capsys, trainer, tmp_path
):
    more = ("--methods", "sgd", "sam", "--sam.rho", "0.1", "0.2", "--out", str(tmp_path / "out"))
    assert main(small("nowhere.npz", *more, "--dry-run")) == 0
    text = capsys.readouterr().out
    for line in (
        r"^dataset +npz:nowhere.npz +given *$",
        r"^batch size +20 +given *$",
        r"^lr +0.1 +default *$",
        r"^m +20 +default \(the whole batch\) *$",
        r"^sam rho 0.1: rho +0.1 +given *$",
        r"^sam rho 0.2: rho +0.2 +given *$",
    ):
        assert re.search(line, text, re.M), line
    arguments = ["--dataset", "hf:nowhere", "--preset", "asam-cifar10", "--model", "mlp"]
    assert main(["compare", *arguments, "--dry-run"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    paper = "the paper's is notebooks/networks.py:wrn28_10"
    for part in ("asam: eta 0.01 ASAM, section 5.2", paper, "PyramidNet-272"):
        assert part in text
    assert not trainer.began_at
    assert not list(tmp_path.iterdir())


# A run.


@pytest.mark.slow
def test_a_process_prints_its_table_and_progress_and_writes_its_results(archive, tmp_path):
    """With two radii of SAM, of which one diverges."""
    out = tmp_path / "new" / "results"
    more = ("--methods", "sgd", "sam", "--sam.rho", "0.1", "1e30", "--seeds", "2")
    more += ("--weight-decay", "0.0005", "--label-noise", "0.4")
    command = [sys.executable, "-m", "sam_optax", *small(archive, *more), "--out", str(out)]
    env = {**os.environ, "COLUMNS": "120"}
    process = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert process.returncode == 0, process.stderr
    assert re.search(r"^sgd +\d+\.\d\d ± \d+\.\d\d +± \d+\.\d\d +\d+\.", process.stdout, re.M)
    assert re.search(r"^sam +ρ 0.1 +\d\d\.\d\d ± ", process.stdout, re.M)
    assert re.search(r"^sam +ρ 1e\+30 +diverged +– +diverged( +–)+ +\d", process.stdout, re.M)
    assert "40 % of the training labels are wrong" in process.stdout
    assert f"The results are in {out}." in process.stdout
    assert re.match(r"compiling sgd \(1 of \d\)", process.stderr)
    assert not CONTROL.search(process.stdout + process.stderr)
    assert names(out) == RESULTS | PICTURES | {"sweep.png"}
    found = results.from_json(out / "results.json")
    assert found["settings"]["batch_size"] == {"value": 20, "source": "given"}
    methods = found["methods"]
    assert [m["name"] for m in methods] == ["sgd", "sam rho 0.1", "sam rho 1e+30"]
    assert [m["method"] for m in methods] == ["sgd", "sam", "sam"]
    assert [m["diverged"] for m in methods] == [0, 0, 2]
    assert methods[1]["hyperparameters"] == {"rho": 0.1}
    for name in PICTURES - {"report.html"}:
        assert (out / name).read_bytes().startswith(b"\x89PNG")


# The studies of the papers, on a slice of digits.


def preset(name, folder, *more):
    """The setting of a paper for a small network, on an archive of images."""
    x, y = load_digits(return_X_y=True)
    x = (16 * x.reshape(-1, 8, 8)).clip(0, 255).astype(np.uint8)
    parts = {"x_train": x[:200], "y_train": y[:200], "x_test": x[200:300], "y_test": y[200:300]}
    np.savez(folder / "digits.npz", **parts)
    data = ["--dataset", f"npz:{folder / 'digits.npz'}", "--model", "mlp", "--devices", "1"]
    more = ["--batch-size", "40", "--seeds", "2", *more, "--out", str(folder / "out")]
    return ["compare", "--preset", name, *data, *more]


def test_each_method_of_a_preset_is_trained_at_its_row_and_swept(capsys, trainer, tmp_path):
    """ASAM's table 2 and figure 4: infinity, words and truth values are given as such."""
    more = ("--asam.rho", "0.5", "1", "--asam.p", "2", "inf", "--asam.normalize-biases", "True")
    more += ("--asam.normalization", "filterwise", "--seed-offset", "7")
    assert main(preset("asam-cifar10", tmp_path, *more)) == 0
    out = tmp_path / "out"
    assert names(out) == RESULTS | PICTURES | {"sweep.png"}
    found = results.from_json(out / "results.json")
    assert found["seeds"] == [7, 8]
    assert found["settings"]["weight_decay"] == {"value": 0.0005, "source": "ASAM, section 5.2"}
    methods = found["methods"]
    assert [method["epochs"] for method in methods] == [400] + [200] * 5
    assert [method["hyperparameters"] for method in methods[:2]] == [{}, {"rho": 0.05}]
    names_of_asam = [f"asam rho {rho} p {p}" for rho in (0.5, 1) for p in (2, "inf")]
    assert [method["name"] for method in methods[2:]] == names_of_asam
    asam = {"rho": 1.0, "eta": 0.01, "p": "inf", "normalization": "filterwise"}
    assert methods[-1]["hyperparameters"] == {**asam, "normalize_biases": True}
    printed, page = capsys.readouterr(), (out / "report.html").read_text()
    assert re.search(r"^sam +ρ 0.05.* 50\.00 ± 0\.00 +± 0\.00 ", printed.out, re.M)
    assert "inf," in printed.out
    assert "ASAM, section 5.2" in page
    assert "PyramidNet-272" in page
    assert "PyramidNet-272" in printed.err


# Files, pipes and terminals.


def into(stdout, archive, out):
    arguments = small(archive, "--methods", "sgd", "--out", str(out))
    command = [sys.executable, "-m", "sam_optax", *arguments]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="has no full device")
def test_results_are_written_where_the_table_cannot_be_printed(archive, tmp_path):
    """As into ``| head``, or on a full disk."""
    reader, writer = os.pipe()
    os.close(reader)
    process = into(writer, archive, tmp_path / "pipe")
    os.close(writer)
    assert process.returncode == 1
    assert "Traceback" not in process.stderr
    with open("/dev/full", "w") as full:
        process = into(full, archive, tmp_path / "disk")
    assert process.returncode == 2
    assert process.stderr.splitlines()[-1] == (
        "sam_optax: standard output cannot be written (no space left on device)."
    )
    assert names(tmp_path / "pipe") >= RESULTS <= names(tmp_path / "disk")


def test_what_cannot_be_written_is_printed(capsys, trainer, archive, tmp_path, monkeypatch):
    """No file can grow beyond 100 bytes once the training is over."""
    resource = pytest.importorskip("resource")
    before, written = resource.getrlimit(resource.RLIMIT_FSIZE), comparison.to_npz

    def fill(params, identity):
        content = written(params, identity)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        return content

    monkeypatch.setattr(comparison, "to_npz", fill)
    try:
        assert main(small(archive, "--methods", "sgd", "--out", str(tmp_path / "new"))) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    printed = capsys.readouterr()
    assert re.search(r"^sgd +50\.00 ± 0\.00", printed.out, re.M)
    refusal = f"--out {tmp_path / 'new'}: cannot be written to (file too large); choose another"
    assert refusal in printed.err
    assert not list(tmp_path.iterdir())


METHOD = """
from sam_optax.experiments import method
@method("with text", radius=())
def a(base, kind="a"): return base.tx
"""


def test_paths_of_any_kind_are_no_markup(capsys, trainer, archive, tmp_path, monkeypatch):
    """Case 46 of the collected mistakes: dollars, brackets, and bytes that are no UTF-8."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m$_$[red].py").write_text(METHOD)
    data = tmp_path / "sales_$2020_$2021 [red]ünï \udcff <b>.npz"
    shutil.copy(archive, data)
    out = tmp_path / "sweep[rho=0.1] $x \udcfe"
    options = ["--methods", "sgd", "m$_$[red].py:a", "--a.kind", "a$_$", "b$_$", "--out", str(out)]
    assert main(small(data.name, *options)) == 0
    assert names(out) == RESULTS | PICTURES
    printed = capsys.readouterr().out
    assert "npz:sales_$2020_$2021 [red]ünï ? <b>.npz: train 40, test 13" in printed
    assert "sweep[rho=0.1] $x ?." in printed
    assert "[red]ünï ? &lt;b&gt;.npz" in (out / "report.html").read_text()
    found = results.from_json(out / "results.json")
    assert found["dataset"]["name"] == f"npz:{data.name}"
    assert main(small(data.name, *options, "--resume")) == 0
    assert "This run is finished" in capsys.readouterr().out


# Interrupts.


def interrupt(*args, **options):
    raise KeyboardInterrupt


MOMENTS = {"training": (comparison, "Training"), "writing": (results, "to_json")}
MOMENTS |= {"drawing": (comparison, "_draw")}


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_interrupt_leaves_whole_files_or_none(
    capsys, monkeypatch, trainer, archive, tmp_path, moment
):
    monkeypatch.setattr(*MOMENTS[moment], interrupt)
    out = tmp_path / "new"
    assert main(small(archive, "--methods", "sgd", "--out", str(out))) == 130
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-1] == "sam_optax: interrupted."
    assert (names(out) if out.exists() else None) == (RESULTS if moment == "drawing" else None)
    assert bool(re.search(r"^sgd +50\.00", printed.out, re.M)) == (moment != "training")


def test_an_interrupted_process_leaves_without_a_shutdown(monkeypatch, capsys):
    """The interpreter's shutdown crashes, now and then, while a computation is running."""

    def leave(code):
        raise SystemExit(f"left with {code}")

    monkeypatch.setattr(comparison, "Training", interrupt)
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(sys, "argv", ["sam_optax", "compare"])
    with pytest.raises(SystemExit, match="left with 130"):
        main()
    assert capsys.readouterr().err.splitlines()[-1] == "sam_optax: interrupted."


# What is not installed.


@pytest.mark.parametrize("kind", [MemoryError, RuntimeError, ValueError])
def test_too_little_memory_is_one_line(capsys, monkeypatch, kind):
    said = {
        RuntimeError: "RESOURCE_EXHAUSTED: 9 bytes",
        ValueError: "INTERNAL: Out of memory (CPU)",
    }

    def fail(options):
        raise kind(*filter(None, [said.get(kind)]))

    monkeypatch.setattr(comparison, "run", fail)
    assert main(["compare"]) == 2
    told = (
        f"sam_optax: out of memory ({said.get(kind, 'no more is free')}); use fewer or smaller ex"
    )
    assert told in capsys.readouterr().err


def test_a_missing_dependency_names_the_extra(capsys, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name="rich.table")

    monkeypatch.setattr(importlib, "import_module", missing)
    assert main(["compare"]) == 2
    assert capsys.readouterr().err == (
        'sam_optax: rich is not installed; run: pip install "sam_optax[experiments]"\n'
    )


def output_of(code):
    """The last line that a process of its own prints."""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return process.stdout.splitlines()[-1]


@pytest.mark.slow
def test_importing_the_library_imports_nothing_of_the_experiments():
    code = (  # JAX itself uses filelock
        "import sys, sam_optax; names = lambda: {n.partition('.')[0] for n in sys.modules} | "
        "set(sys.modules); library = names(); from sam_optax.experiments import entry; import "
        "sam_optax.__main__; extra = entry._EXTRA - {'filelock'} | {'datasets'}; "
        "print(sorted(library & (extra | {'sam_optax.experiments'})), sorted(names() & extra))"
    )
    assert output_of(code) == "[] []"


@pytest.mark.slow
def test_the_command_imports_what_is_asked_for_alone():
    """Hugging Face's library and the figures take seconds to import."""
    code = (
        "import sys; from sam_optax.__main__ import main; main(['compare', '--dry-run']); "
        "print(sorted({n.partition('.')[0] for n in sys.modules} & {'datasets', 'matplotlib', "
        "'PIL'}))"
    )
    assert output_of(code) == "[]"
