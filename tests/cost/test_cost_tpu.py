"""Steps compiled for TPUs that need not be there: what a method adds to its hand-written step."""

import functools
import importlib.util
import re

import jax
import pytest
from cost_programs import BASE_TX, mean
from more_by_hand import LIBRARY, MORE, STARTS, skipping

from sam_optax.experiments.cost import measure, problems, steps
from sam_optax.experiments.cost.handwritten import by_hand
from sam_optax.experiments.cost.placement import DATA, LIBTPU, Placement, make_mesh

if importlib.util.find_spec("libtpu") is None:
    pytest.skip('needs pip install "sam_optax[tpu]"', allow_module_level=True)
pytestmark = pytest.mark.slow

# One in each row of the batch costs what R-SAM's noise does, so that it is large.
PROBLEM = problems.make("mlp:3x1024", 4096)
LOSSES = measure.counted(PROBLEM.losses)
PARAMS = jax.eval_shape(PROBLEM.init)
PLACEMENTS = {
    "data parallel": ("v5e:2x2", (), {}),
    "FSDP": ("v5e:2x2", (), {"fsdp": True}),
    "FSDP x TP on 4": ("v5e:2x2", ("data=2", "model=2"), {"fsdp": True}),
    "FSDP x TP on 256": ("v5e:16x16", ("data=64", "model=4"), {"fsdp": True}),
    "shard_map": ("v5e:2x2", (), {"per_device": True}),
}
METHODS = ["sam", "asam", "fsam", "rsam", "momentum", "every", "info", "skip_nonfinite"]
ALLOWED = {"flops": 1.005, "bytes accessed": 1.03}


@pytest.fixture(autouse=True, scope="module")
def _libtpu_by_itself():
    jax.devices()  # the flags for CPUs, which libtpu refuses, are read once
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("XLA_FLAGS")
        for name, value in LIBTPU.items():
            patch.setenv(name, value)
        yield


def handwritten(method, axis):
    if method == "skip_nonfinite":
        return skipping(handwritten("sam", axis))
    if method not in MORE:
        row = steps.Row(method, by_hand=True)
        return steps.make(row, LOSSES, per_device=axis is not None)
    return by_hand(MORE[method], mean(LOSSES), BASE_TX, STARTS.get(method), axis)


@functools.cache
def built(placement, method, hand=False):
    topology, axes, options = PLACEMENTS[placement]
    placed = Placement(make_mesh(f"tpu:{topology}", axes), **options)
    axis = DATA if placed.per_device else None

    def make():
        if hand:
            return handwritten(method, axis)
        changes = {"rho": 0.5} if method in ("info", "skip_nonfinite") else LIBRARY.get(method, {})
        row = steps.Row(method)
        return steps.make(row, LOSSES, per_device=placed.per_device, **changes)

    return measure.build(make, PARAMS, PROBLEM.batch, placed)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_costs_what_a_handwritten_step_costs(placement, method):
    ours, theirs = (built(placement, method, hand).record for hand in (False, True))
    print(
        {k: (theirs[k], ours[k]) for k in measure.COLLECTIVES if theirs[k] != ours[k]},
        {k: round(ours[k] / theirs[k], 4) for k in [*ALLOWED, "temporaries"]},
    )
    assert ours["gradients"] <= theirs["gradients"]
    assert {k: ours[k] for k in measure.COLLECTIVES if ours[k] > theirs[k]} == {}
    assert {
        k: ours[k] / theirs[k] for k, most in ALLOWED.items() if ours[k] > most * theirs[k]
    } == {}
    text = built(placement, method).compiled.as_text()
    assert not foreign(text)


def foreign(text):
    """float64, transfers from and to the host, and dynamic shapes in a program."""
    host = r"\b(?:infeed|outfeed|send|recv)(?:-done)?\(|custom_call_target=\"[^\"]*[Hh]ost[^\"]*\""
    return re.findall(rf"f64\[|\[<=|{host}", text)
