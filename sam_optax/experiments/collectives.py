"""What a sharpness-aware step sends between devices, from ahead-of-time compilation.

``python -m sam_optax.experiments.collectives 8 64 512`` compiles one step of an MLP for that many
(pretended) CPU devices and prints a Markdown table; nothing is trained.
"""

import json
import os
import re
import subprocess
import sys

WIDTH, LAYERS, ROWS = 1024, 4, 8
"""Width and number of the MLP's square kernels, and rows of the batch for each device."""


def compile_steps(devices: int) -> list[dict[str, float | str]]:
    """Compiles every variant for the devices of this process: one row each."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    import sam_optax

    mesh = Mesh(np.array(jax.devices()[:devices]), ("batch",))
    shapes = {f"layer{i}": {"kernel": (WIDTH, WIDTH), "bias": (WIDTH,)} for i in range(LAYERS)}
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731

    def loss(params, x):  # type: ignore[no-untyped-def]
        for layer in params.values():
            x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
        return jnp.mean(x**2)

    def variant(name, tx, sharding, mapped):  # type: ignore[no-untyped-def]
        def step(params, state, x):  # type: ignore[no-untyped-def]
            grad_fn = jax.grad(lambda p: loss(p, x))
            if name == "SGD":
                grads = grad_fn(params)
                grads = jax.lax.pmean(grads, "batch") if mapped else grads
                updates, state = tx.update(grads, state, params)
            else:
                updates, state = tx.update(None, state, params, grad_fn=grad_fn)
            return optax.apply_updates(params, updates), state

        put = lambda shape, spec: jax.ShapeDtypeStruct(  # noqa: E731
            shape, jnp.float32, sharding=NamedSharding(mesh, spec)
        )
        params = jax.tree.map(lambda s: put(s, sharding), shapes, is_leaf=is_shape)
        state = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(
                s.shape, s.dtype, sharding=NamedSharding(mesh, sharding if s.ndim else P())
            ),
            jax.eval_shape(tx.init, params),
        )
        x = put((ROWS * devices, WIDTH), P("batch"))
        if mapped:
            step = jax.shard_map(
                step, mesh=mesh, in_specs=(P(), P(), P("batch")), out_specs=P(), check_vma=False
            )
        shardings = jax.tree.map(lambda s: s.sharding, (params, state))
        compiled = jax.jit(step, donate_argnums=(0, 1), out_shardings=shardings)
        program = compiled.lower(params, state, x).compile()
        return {
            "devices": devices,
            "params": "replicated" if mapped else "sharded (FSDP)",
            "step": name,
            "temporaries": program.memory_analysis().temp_size_in_bytes / 2**20,
            **collectives(program.as_text()),
        }

    sgd = optax.sgd(0.1, momentum=0.9)
    sam = sam_optax.sam()
    return [
        variant("SGD", sgd, P(), True),
        variant("SAM", sam_optax.sharpness_aware(sgd, sam, axis_name="batch"), P(), True),
        variant(
            "SAM, synchronized",
            sam_optax.sharpness_aware(sgd, sam, axis_name="batch", sync_perturbation=True),
            P(),
            True,
        ),
        variant("SGD", sgd, P("batch"), False),
        variant("SAM", sam_optax.sharpness_aware(sgd, sam), P("batch"), False),
    ]


def collectives(program: str) -> dict[str, float]:
    """MiB that each kind of collective of a compiled program results in, on one device."""
    program = re.sub(r"/\*.*?\*/", "", program)
    totals = {}
    for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"):
        elements = 0
        for result in re.findall(rf"= (\(?[^=]*?\)?) {kind}(?:-start)?\(", program):
            for dims in re.findall(r"[fsu]32\[([\d,]*)\]", result):
                size = 1
                for dim in filter(None, dims.split(",")):
                    size *= int(dim)
                elements += size
        totals[kind] = elements * 4 / 2**20
    return totals


def main() -> None:
    """Prints the table for the numbers of devices on the command line."""
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(compile_steps(int(sys.argv[2]))))
        return
    kinds: list[str] = []
    for devices in sys.argv[1:] or ["8"]:
        flags = f"--xla_force_host_platform_device_count={devices}"
        child = subprocess.run(
            [sys.executable, "-m", "sam_optax.experiments.collectives", "--child", devices],
            env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
        for row in json.loads(child.stdout.splitlines()[-1]):
            if not kinds:
                kinds = list(row)
                print("| " + " | ".join(kinds) + " |\n|" + "---|" * len(kinds))
            print("| " + " | ".join(_cell(row[kind]) for kind in kinds) + " |", flush=True)


def _cell(value: float | str) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
