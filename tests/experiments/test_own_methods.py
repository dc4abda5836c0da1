"""Methods of users: from files and from Python."""

import json
import re
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import optax
import pytest

import sam_optax
from sam_optax.__main__ import main
from sam_optax.experiments import Base, compare, method, named, open_run
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.methods import registry

pytestmark = pytest.mark.usefixtures("compile_fast")

HALF = """
import sam_optax
from sam_optax.experiments import Base, method

@method("SAM with half of the radius", weight_decay=0.001)
def half(base: Base, rho: float = 1, flipped=False):
    return base.sharp(sam_optax.sam(rho / 2))
"""
MINE = """
@method("another SAM")
def sam(base, rho=0.1): return base.sharp(sam_optax.sam(rho))

@method("only the last layer, as params are named")
def last(base, rho=0.1):
    mask = lambda params: {k: k == "Dense_2" for k in params}
    return base.sharp(sam_optax.perturb_only(sam_optax.sam(rho), mask))

@method("an optimizer", radius=(), gradients=1)
def lion(base, lr=0.01): return optax.lion(lr)

@method("its p is infinite", radius=("r",))
def norm(base, r=0.1, p: float = float("inf"), of="inf"):
    assert (p, of) == (float("inf"), "inf")
    return base.sharp(sam_optax.asam(r, p=p))

two = method("a function without a name")(lambda base, rho=0.1: base.sharp(sam_optax.sam(rho)))

@method("forgets to return")
def nothing(base, rho=0.1): base.sharp(sam_optax.sam(rho))

@method("fails")
def fails(base, rho=0.1): return base.sharper

@method("has no radius")
def plain(base, rho=0.1): return base.tx

@method("masks what is not there")
def masked(base, rho=0.1):
    return base.sharp(sam_optax.perturb_only(sam_optax.sam(rho), {"a": True}))

@method("wants another step", arguments=lambda step, **_: {"grad_fn": step.gradient})
def stepless(base, rho=0.1): return base.sharp(sam_optax.sam(rho))

@method("counts wrong", gradients=lambda k: 1 + 1 / k)
def counts(base, rho=0.1, k=2): return base.sharp(sam_optax.sam(rho))

def function(base, rho=0.1): return base.tx
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path("methods_of_mine.py")
    path.write_text(HALF + "import optax\n" + MINE)
    Path("script.py").write_text("import sys; sys.exit(0)")
    return path


@pytest.fixture
def options(archive):
    return {"dataset": f"npz:{archive}", "epochs": 1, "seeds": 1, "batch_size": 20, "lr": 0.1}


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.slow
def test_a_method_of_a_file_is_trained_with_its_hyperparameters(file, options):
    """Half with the radius 1, which is an integer of type float, is SAM with 0.5."""
    methods = ["sgd", "sam", f"{file}:half", f"{file}:last", f"{file}:lion"]
    given = {**options, "weight_decay": 0.0, "half": {"rho": [1, 0.4]}, "sam": {"rho": 0.5}}
    found = compare(methods=methods, **given)
    assert list(found.params) == ["sgd", "sam", "half rho 1", "half rho 0.4", "last", "lion"]
    equal(found.params["half rho 1"], found.params["sam"])
    with pytest.raises(AssertionError):
        equal(found.params["half rho 0.4"], found.params["sam"])
    half = found.results["methods"][2]
    assert (half["method"], half["gradients"]) == (f"{file}:half", 2.0)
    assert half["hyperparameters"] == {"rho": 1, "flipped": False}
    assert half["sources"] == {"rho": "given", "flipped": f"default of {file}:half"}
    assert re.search(r"^half +ρ 1, flipped no", repr(found), re.M)


def test_the_command_knows_the_options_of_a_file(file, options, capsys):
    arguments = ["compare", "--methods", f"{file}:half", "--dataset", options["dataset"]]
    more = ["--half.rho", "0.3", "--half.flipped", "True", "--dry-run"]
    assert main([*arguments, *more]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^half: flipped +yes +given", text, re.M)
    assert re.search(rf"^weight decay +0.001 +default of .*{file.name}:half", text, re.M)
    assert main(["compare", "--help", "asam"]) == 0
    assert "(default: that of the method)" in " ".join(capsys.readouterr().out.split())
    assert main([*arguments, "--half.rh", "1"]) == 2
    assert "--half.rh: unknown option; did you mean --half.rho?" in capsys.readouterr().err
    assert main(["compare", "--help", f"{file}:sam"]) == 0  # in the place of the one built in
    assert "(default: 0.1)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ("none.py:sam", "--methods none.py: there is no such file"),
        ("FILE:function", "--methods FILE:function: is of type function; give a .* @method"),
        ("FILE:sam sam", "--methods FILE:sam: one of two named sam; rename its function"),
        ("FILE:nothing", r"--methods nothing: fails with TypeError: it returns None; let .*sharp"),
        ("FILE:fails", "--methods fails: fails with AttributeError: .*sharper"),
        ("FILE:half --half.rho -1", r"--half.rho must be in \[0, inf\), got -0.5"),
        ("FILE:half --half.rho inf", r"--half.rho must be in \[0, inf\), got inf"),
        ("FILE:half --half.rho nan", "--half.rho nan: use numbers, or inf"),
        ("script.py:sam", r"script.py fails with SystemExit: 0\."),
    ],
)
def test_what_is_no_method_is_an_error_of_the_user(file, methods, message, capsys):
    arguments = methods.replace("FILE", str(file)).split()
    assert main(["compare", "--dry-run", "--methods", *arguments]) == 2
    assert re.search(message.replace("FILE", str(file)), capsys.readouterr().err)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("plain", "--methods plain: fails with TypeError: it needs gradients; give radius=()"),
        ("masked", "--methods masked: fails with ValueError: mask must be a pytree"),
        ("stepless", "--methods stepless: fails with AttributeError: .* no attribute 'gradient'"),
        ("counts", "--methods counts: fails with TypeError: .* unexpected .* argument 'rho'"),
    ],
)
def test_what_fails_in_training_names_the_method(file, name, message, options):
    with pytest.raises(UserError, match=message):
        compare(methods=[f"{file}:{name}"], **options)


def test_a_method_is_named_as_in_its_file_and_gets_numbers_as_numbers(file, options, tmp_path):
    """In results infinity is text, and those of NumPy become Python's."""
    names = [f"{file}:{name}" for name in ("norm", "two")]
    options |= {"lr": np.float32(0.1), "batch_size": np.int64(20)}
    found = compare(methods=names, two={"rho": np.array([0.1, 0.2])}, out=tmp_path, **options)
    written = json.loads((tmp_path / "results.json").read_text())["methods"]
    assert [row["name"] for row in written] == ["norm", "two rho 0.1", "two rho 0.2"]
    assert written[0]["hyperparameters"] == {"r": 0.1, "p": "inf", "of": "inf"}
    assert json.loads(json.dumps(found.results["methods"])) == written


def test_a_run_whose_file_has_changed_is_another(file, options, tmp_path):
    out, methods, net = tmp_path / "run", ["sgd", f"{file}:half"], Path("net_of_mine.py")
    net.write_text("import flax.linen as nn\nnet = nn.Dense(3)\n")
    options["model"] = f"{net}:net"
    found = compare(methods=methods, out=out, **options)
    settings = found.results["settings"]
    assert settings["model_sha256"]["value"] == named.sha256([f"{net}:net"])
    assert compare(methods=methods, out=out, resume=True, **options).results == found.results
    assert [of.method for of in open_run(out).networks] == ["sgd", "half"]
    with pytest.raises(UserError, match=r"--half.rho 1 \(now 2\)\. Give the same"):
        compare(methods=methods, out=out, resume=True, half={"rho": 2}, **options)
    code = {file: HALF.replace("rho / 2", "rho / 3"), net: net.read_text() + "# another\n"}
    for path, what in {net: f"--model {net}:net", file: f"--methods {file}:half"}.items():
        before = path.read_text()
        path.write_text(code[path])
        changed = rf"--resume: .*: the file of {what.split()[0]} has changed\."
        with pytest.raises(UserError, match=changed):
            compare(methods=methods, out=out, resume=True, **options)
        with pytest.raises(
            UserError, match=f"{out}: the file of {what.split()[0]} has changed since"
        ):
            open_run(out)
        path.write_text(before)
    file.write_text(code[file])
    again = compare(methods=methods, **options)  # executed anew
    equal(again.params["sgd"], found.params["sgd"])
    with pytest.raises(AssertionError):
        equal(again.params["half"], found.params["half"])


@pytest.mark.slow
def test_a_tuned_run_is_resumed(file, options, tmp_path):
    given = {"methods": [f"{file}:half"], "tune": True, "trials": 2, "out": tmp_path, **options}
    found = compare(**given).results
    assert found["methods"][0]["tune"]["around"] == {"half.rho": 1, "weight_decay": 0.001}
    again = compare(**given, resume=True).results
    assert json.loads(json.dumps(again)) == json.loads(json.dumps(found))


@pytest.mark.slow
def test_a_hyperparameter_may_have_the_name_of_a_tuned_setting(file, options):
    given = {"methods": [f"{file}:lion"], "tune": True, "tune_lr": True, "trials": 1, **options}
    (row,) = compare(**given).results["methods"]
    assert [*row["tune"]["around"]] == ["weight_decay", "lr"]
    assert row["hyperparameters"] == {"lr": 0.01}
    assert row["settings"]["lr"]["value"] == row["tune"]["chosen"]["lr"] != 0.01


@method("named as an argument")
def tune(base, rho=0.5):
    return base.sharp(sam_optax.sam(rho))


def test_methods_from_python_that_are_none():
    with pytest.raises(UserError, match="methods: tune is named as an argument of compare; rename"):
        compare(methods=[tune])
    with pytest.raises(UserError, match=r'methods: give a list of them, such as \["sgd", "sam"\]'):
        compare(methods=tune)


@method("SAM of this file")
def mine(base: Base, rho: float = 0.5):
    return base.sharp(sam_optax.sam(rho))


def test_an_object_from_python_is_named_by_its_place(options):
    options |= {"weight_decay": 0.0, "mine": {"rho": 0.3}, "sam": {"rho": 0.3}}
    found = compare(methods=["sam", mine], **options)
    equal(found.params["mine"], found.params["sam"])
    assert found.results["methods"][1]["method"] == "test_own_methods:mine"
    assert registry.get("test_own_methods:mine") == mine
    with pytest.raises(UserError, match=r"test_own_methods has no <lambda>\."):
        compare(methods=[lambda base, rho=0.1: base.tx], **options)


def test_the_hyperparameters_of_a_function():
    @method("many")
    def many(
        base,
        rho: Annotated[float | None, "ρ."] = 1,
        a: "int | None" = None,
        b=True,
        c: float = 2,
        d: Any = "x",
    ):
        return optax.identity()

    kinds = {name: of.annotation.__args__[0] for name, of in many.options.items()}
    assert kinds == {"rho": float, "a": int, "b": bool, "c": float, "d": str}
    assert many.options["rho"].annotation.__metadata__ == ("ρ.",)
    assert many.variant(b=False).hyperparameters == {"rho": 1, "b": False, "c": 2, "d": "x"}


def typed(base, rho: float):
    return base.tx


def optional(base, rho: float | None = None):
    return base.tx


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (typed, "rho of typed needs a default"),
        (lambda base, rho=(0.1, 0.2): base.tx, "rho of <lambda> needs a default of type int"),
        (optional, "optional has no hyperparameter rho with a number as its default"),
        (lambda base, sigma=0.1: base.tx, r"has no hyperparameter rho .* radius=\(NAME,\)"),
    ],
)
def test_functions_that_make_no_method(function, message):
    with pytest.raises(TypeError, match=message):
        method("wrong")(function)
