"""Steps compiled for TPUs that need not be there: what a method adds to its hand-written step."""

import functools
import importlib.util
import os
import re

import jax
import pytest
from cost_programs import BASE_TX
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from more_by_hand import LIBRARY, by_hand, skipping

from sam_optax.experiments.cost import measure, steps
from sam_optax.experiments.cost.measure import DATA, Placement, make_mesh

if importlib.util.find_spec("libtpu") is None:
    pytest.skip('needs pip install "sam_optax[tpu]"', allow_module_level=True)
pytestmark = pytest.mark.slow

SMALL = steps.make("mlp:3x256", 4096)
# Kernels of more than 2^16 elements, for smaller ones share a draw of R-SAM's noise that is not
# sharded, and a batch at which the arithmetic of the noise is small. It compiles more slowly.
LARGE = steps.make("mlp:2x512", 8192)
PLACEMENTS = {
    "data parallel": ("v5e:2x2", (), {}),
    "FSDP": ("v5e:2x2", (), {"fsdp": True}),
    "FSDP x TP on 4": ("v5e:2x2", ("data=2", "model=2"), {"fsdp": True}),
    "FSDP x TP on 256": ("v5e:16x16", ("data=64", "model=4"), {"fsdp": True}),
    "shard_map": ("v5e:2x2", (), {"per_device": True}),
    "pmap": ("v5e:2x2", (), {"per_device": True}),
}
METHODS = ["sam", "asam", "fsam", "rsam", "momentum", "every", "info", "skip_nonfinite"]
ON_LARGE = ("rsam", "skip_nonfinite")
ALLOWED = {"flops": 1.005, "bytes accessed": 1.03, "bytes sent": 1.001}
# More than of SAM by hand: the norms of the kernels, of the gradient at the start, and of both;
# and whether all is finite.
MORE_REDUCTIONS = {"rsam": 3, "skip_nonfinite": 1}
# Bounds that do not hold where the params are replicated, with what was measured.
REPLICATED = ("data parallel", "shard_map", "pmap")
EXCEEDED = {
    "rsam": "FLOPs 1.008, bytes 1.08: each device draws the noise of all params",
    "skip_nonfinite": "bytes 1.04: the base optimizer's update is in a conditional",
}


class Pmapped(Placement):
    """With a leading axis of the devices on each array."""

    def place(self, step, params, batch):
        n, sharding = self.mesh.size, NamedSharding(self.mesh, P(DATA))
        state = jax.eval_shape(step.init, params)
        few = lambda x: jax.ShapeDtypeStruct((len(x) // n, *x.shape[1:]), x.dtype)
        stacked = lambda x: jax.ShapeDtypeStruct((n, *x.shape), x.dtype, sharding=sharding)
        arguments = jax.tree.map(stacked, (params, state, jax.tree.map(few, batch)))
        devices = list(self.mesh.devices.flat)
        jitted = jax.pmap(step.step, axis_name=DATA, devices=devices, donate_argnums=(0, 1))
        return jitted, arguments


@pytest.fixture(autouse=True, scope="module")
def _environment_of_libtpu_ends_with_the_module():
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@functools.cache
def built(placement, method, hand):
    topology, axes, options = PLACEMENTS[placement]
    kind = Pmapped if placement == "pmap" else Placement
    placed = kind(make_mesh(f"tpu:{topology}", axes), **options)
    problem = LARGE if method in ON_LARGE else SMALL
    axis = DATA if placed.per_device else None
    if not hand:
        changes = {"rho": 0.5} if method in ("info", "skip_nonfinite") else LIBRARY.get(method, {})
        step = steps.library(method, problem.losses, BASE_TX, axis, **changes)
    else:  # R-SAM's draws with jax.random.normal, and compiles for minutes: SAM's in its place
        of = "sam" if method in ON_LARGE else method
        step = by_hand(of, problem.losses, BASE_TX, axis)
        step = skipping(step) if method == "skip_nonfinite" else step
    return measure.Build(step, jax.eval_shape(problem.init), problem.batch, placed)


CASES = [
    pytest.param(
        placement,
        method,
        marks=[pytest.mark.xfail(reason=EXCEEDED[method], raises=AssertionError)]
        if method in EXCEEDED and placement in REPLICATED
        else [],
    )
    for placement in PLACEMENTS
    for method in METHODS
]


@pytest.mark.parametrize(("placement", "method"), CASES)
def test_costs_what_a_handwritten_step_costs(placement, method):
    ours, theirs = (built(placement, method, hand).record for hand in (False, True))
    ratios = {key: ours[key] / theirs[key] for key in ALLOWED}
    assert {key: ratio for key, ratio in ratios.items() if ratio > ALLOWED[key]} == {}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_communicates_what_a_handwritten_step_does(placement, method):
    ours, theirs = (built(placement, method, hand).record for hand in (False, True))
    more = {kind: ours[kind] - theirs[kind] for kind in measure.COLLECTIVES}
    assert more.pop("all-reduce") <= MORE_REDUCTIONS.get(method, 0)
    assert {kind: count for kind, count in more.items() if count > 0} == {}


def test_the_words_of_rsams_noise_are_scalars():
    """A TPU's compiler reserves 16 KiB for an array of two: measured 1.38, with arrays 1.58."""
    ours, theirs = (built("FSDP x TP on 256", "rsam", hand).record for hand in (False, True))
    assert ours["temporaries"] < 1.45 * theirs["temporaries"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_neither_float64_nor_the_host_nor_dynamic_shapes(placement, method):
    assert not foreign(built(placement, method, False).compiled.as_text())


def test_foreign_instructions_are_found():
    def wide(x):
        return jax.pure_callback(lambda x: x, x, x) + x

    placed = NamedSharding(make_mesh("tpu:v5e:2x2"), P())
    x = jax.ShapeDtypeStruct((8,), jax.numpy.float32, sharding=placed)
    assert foreign(jax.jit(wide).lower(x).compile().as_text())
    assert foreign("%a = f64[8]{0} add(%b, %b)")
    assert foreign("%a = f32[<=8]{0} add(%b, %b)")


def foreign(text):
    """float64, transfers from and to the host, and dynamic shapes in a program."""
    host = r"\b(?:infeed|outfeed|send|recv)(?:-done)?\(|custom_call_target=\"[^\"]*[Hh]ost[^\"]*\""
    return re.findall(rf"f64\[|\[<=|{host}", text)
