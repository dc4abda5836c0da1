"""``python -m sam_optax collectives``: the communication cost of a step between devices."""

import dataclasses
import functools
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

import sam_optax
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.reporting import output
from sam_optax.experiments.reporting.progress import Progress
from sam_optax.experiments.reporting.results import versions
from sam_optax.experiments.reporting.table import ruled
from sam_optax.experiments.types import Function, PyTree, Record

WIDTH, LAYERS, ROWS = 1024, 4, 8
"""Width and number of the MLP's square kernels, and rows of the batch per device."""


@dataclasses.dataclass(frozen=True)
class Collectives:
    """Counts the communication of a training step: SGD, SAM, and SAM with synchronized ε.

    Compiles a step of an MLP with 4 layers of 1024x1024 ahead of time, for simulated CPU devices;
    nothing is trained. Params are replicated or sharded (FSDP).
    """

    devices: tuple[int, ...] = (8,)
    """Numbers of devices to compile for."""
    out: Path | None = None
    """JSON file to write the table to, with a figure beside it (.png)."""

    def __post_init__(self) -> None:
        if not self.devices or min(self.devices) < 1 or WIDTH % math.lcm(*self.devices):
            given = " ".join(map(str, self.devices))
            raise UserError(f"--devices {given}: use divisors of {WIDTH}, such as 8 64 512.")
        output.check_file(self.out)


def run(options: Collectives) -> None:
    """Compiles the steps, writes the file and prints a table."""
    rows: list[Record] = []
    work = {f"for {n} devices": (1.0, 1) for n in options.devices}
    with Progress(Console(stderr=True, highlight=False), work, "compiling") as progress:
        for devices in options.devices:
            start = time.perf_counter()
            rows += _in_another_process(devices)
            progress.done(f"for {devices} devices", time.perf_counter() - start)
    if options.out is not None:
        output.write_json(options.out, {"versions": versions(), "steps": rows})
        output.replace_files({options.out.with_suffix(".png"): draw(rows)})
    table = ruled()
    sent = [key for key in rows[0] if any(row[key] != 0 for row in rows)]
    for i, heading in enumerate(sent):
        table.add_column(heading.replace("-", "-\n"), justify="left" if 0 < i < 3 else "right")
    for row in rows:
        values = (row[key] for key in sent)
        table.add_row(*(f"{x:.1f}" if isinstance(x, float) else str(x) for x in values))
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"\nMiB on one device; the params are {LAYERS * WIDTH**2 * 4 // 2**20} MiB. temporaries: "
        "memory in addition to arguments and results; collectives: size of their results, with "
        "none of other kinds",
        style="dim",
    )


def draw(rows: Sequence[Record]) -> bytes:
    """Bars of what a device sends and receives in each step, a panel for each kind of params."""
    from matplotlib.figure import Figure

    from sam_optax.experiments.reporting.axes import legend, png, tidy

    kinds = [kind for kind in [*rows[0]][4:] if max(row[kind] for row in rows) >= 0.5]
    placements = {row["params"]: [r for r in rows if r["params"] == row["params"]] for row in rows}
    figure = Figure(figsize=(10, 1.6 + 0.25 * max(map(len, placements.values()))))
    figure.set_layout_engine("constrained")
    for axes, (params, shown) in zip(
        figure.subplots(1, len(placements), sharex=True), placements.items(), strict=True
    ):
        end = np.zeros(len(shown))
        for kind in kinds:
            sent = np.array([row[kind] for row in shown])
            names = [f"{row['step']}, {row['devices']} devices" for row in shown]
            axes.barh(names, sent, left=end, label=kind)
            end += sent
        axes.invert_yaxis()
        axes.set(title=f"params {params}", xlabel="MiB on one device, per step")
        tidy(axes, "x")
    legend(figure, axes)
    return png(figure)


def _in_another_process(devices: int) -> list[Record]:
    """:func:`compile_steps` in a process with the given number of devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    program = f"from {__name__} import *; print(json.dumps(compile_steps({devices})))"
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    printed = subprocess.check_output([sys.executable, "-c", program], env=env, text=True)
    return json.loads(printed.splitlines()[-1])


def compile_steps(devices: int) -> list[Record]:
    """Compiles every variant for the devices of this process; one row per variant."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("batch",))

    def put(leaf: jax.ShapeDtypeStruct, spec: P) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, spec if leaf.ndim else P())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    def init() -> optax.Params:
        layer = {"kernel": jnp.zeros((WIDTH, WIDTH)), "bias": jnp.zeros(WIDTH)}
        return {f"layer{i}": layer for i in range(LAYERS)}

    def loss(params: optax.Params, x: jax.Array) -> jax.Array:
        for layer in params.values():
            x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
        return jnp.mean(x**2)

    def variant(name: str, tx: optax.GradientTransformationExtraArgs, mapped: bool) -> Record:
        def step(params: optax.Params, state: optax.OptState, x: jax.Array) -> PyTree:
            grad_fn = jax.grad(lambda p: loss(p, x))
            if name == "SGD":
                grads = jax.lax.pmean(grad_fn(params), "batch") if mapped else grad_fn(params)
                updates, state = tx.update(grads, state, params)
            else:
                updates, state = tx.update(None, state, params, grad_fn=grad_fn)
            return optax.apply_updates(params, updates), state

        params = jax.eval_shape(init)
        place = functools.partial(put, spec=P() if mapped else P("batch"))
        carry = jax.tree.map(place, (params, jax.eval_shape(tx.init, params)))
        x = put(jax.ShapeDtypeStruct((ROWS * devices, WIDTH), jnp.float32), P("batch"))
        whole: Function = step
        if mapped:
            specs: Any = {"in_specs": (P(), P(), P("batch")), "out_specs": P()}
            whole = jax.shard_map(step, mesh=mesh, **specs, check_vma=False)
        shardings = jax.tree.map(lambda s: s.sharding, carry)
        jitted = jax.jit(whole, donate_argnums=(0, 1), out_shardings=shardings)
        compiled: Any = jitted.lower(*carry, x).compile()
        return {
            "devices": devices,
            "params": "replicated" if mapped else "sharded (FSDP)",
            "step": name,
            "temporaries": compiled.memory_analysis().temp_size_in_bytes / 2**20,
            **collectives(compiled.as_text()),
        }

    sgd = optax.sgd(0.1, momentum=0.9)
    sharp = functools.partial(sam_optax.sharpness_aware, sgd, sam_optax.sam())
    synchronized = sharp(axis_name="batch", sync_perturbation=True)
    return [
        variant("SGD", sgd, True),
        variant("SAM", sharp(axis_name="batch"), True),
        variant("SAM, synchronized", synchronized, True),
        variant("SGD", sgd, False),
        variant("SAM", sharp(), False),
    ]


def collectives(program: str) -> dict[str, float]:
    """MiB of the results of each kind of collective in a compiled program, on one device."""
    program = re.sub(r"/\*.*?\*/", "", program)
    totals = {}
    for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"):
        elements = 0
        for result in re.findall(rf"= (\(?[^=]*?\)?) {kind}(?:-start)?\(", program):
            for dims in re.findall(r"[fsu]32\[([\d,]*)\]", result):
                elements += math.prod(int(dim) for dim in dims.split(",") if dim)
        totals[kind] = elements * 4 / 2**20
    return totals
