"""The command that counts what a step sends between devices."""

import json

import pytest

from sam_optax.__main__ import main
from sam_optax.experiments.collectives import collectives, draw
from sam_optax.experiments.reporting import axes

pytestmark = pytest.mark.slow


def test_a_step_of_sam_sends_what_two_gradients_are(tmp_path, capsys):
    out = tmp_path / "collectives.json"
    assert main(["collectives", "--devices", "2", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "SAM, synchronized" in printed
    assert "…" not in printed
    steps = {(s["params"], s["step"]): s for s in json.loads(out.read_text())["steps"]}
    reduced = {name: s["all-reduce"] for (params, name), s in steps.items() if params[0] == "r"}
    assert reduced["SGD"] == pytest.approx(16, abs=0.1)  # four kernels of 4 MiB
    assert reduced["SAM"] == pytest.approx(16, abs=0.1)
    assert reduced["SAM, synchronized"] == pytest.approx(32, abs=0.1)
    gathered = {name: s["all-gather"] for (params, name), s in steps.items() if params[0] == "s"}
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert gathered["SAM"] == pytest.approx(2 * gathered["SGD"], rel=0.1)


def test_the_figure_has_a_bar_for_each_step_and_kind(monkeypatch):
    drawn = []
    monkeypatch.setattr(axes, "png", lambda figure: drawn.append(figure) or b"")
    sent = {"all-reduce": 16.0, "all-gather": 0.0, "all-to-all": 0.4}
    rows = [
        {
            "devices": 8,
            "params": params,
            "step": step,
            "temporaries": 1.0,
            **sent,
            "all-gather": mib,
        }
        for params, step, mib in [("replicated", "SGD", 0.0), ("sharded", "SAM", 34.0)]
    ]
    draw(rows)
    bars = [[(bar.get_x(), bar.get_width()) for bar in of.patches] for of in drawn[0].axes]
    assert bars == [[(0, 16), (16, 0)], [(0, 16), (16, 34)]]
    names = [of.get_yticklabels()[0].get_text() for of in drawn[0].axes]
    assert names == ["SGD, 8 devices", "SAM, 8 devices"]


def test_numbers_of_devices_that_do_not_divide(capsys):
    assert main(["collectives", "--devices", "8", "3"]) == 2
    assert "--devices 8 3: use divisors of 1024" in capsys.readouterr().err


def test_results_of_several_arrays_are_added():
    program = """
  %a = f32[256,1024]{1,0} all-reduce(%x), replica_groups={}
  %b = (f32[1024]{0}, /*index=1*/f32[3,1024]{1,0}) all-reduce-start(%x, %y)
"""
    found = collectives(program)
    assert found["all-reduce"] == (256 + 1 + 3) * 1024 * 4 / 2**20
    assert found["all-gather"] == 0
