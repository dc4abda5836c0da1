"""One process of a training run: started by ``test_processes.py`` once, or twice side by side.

Usage: two_processes.py METHOD PROCESS_ID NUM_PROCESSES PORT
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import sam_optax


def main(method, process, count, port):
    if count > 1:
        jax.distributed.initialize(
            f"127.0.0.1:{port}", count, process, initialization_timeout=60, local_device_ids=[0]
        )
    from methods import make  # holds a key, which is made once the devices are known

    tx = sam_optax.sharpness_aware(optax.sgd(0.1, momentum=0.9), make(method, 0.1))
    mesh = Mesh(np.array(jax.devices()[:count]), ("batch",))
    replicated, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("batch"))
    batches = np.random.default_rng(0).normal(size=(5, 8, 4)).astype(np.float32)
    rows = slice(process * 8 // count, (process + 1) * 8 // count)
    params = {"kernel": np.full((4, 3), 0.5, np.float32), "bias": np.zeros(3, np.float32)}
    place = lambda x: jax.make_array_from_process_local_data(replicated, x)
    params = jax.tree.map(place, params)
    state = jax.jit(tx.init, out_shardings=replicated)(params)

    @jax.jit
    def step(params, state, x):
        def loss(p):
            return jnp.mean(jnp.tanh(x @ p["kernel"] + p["bias"]) ** 2)

        updates, state = tx.update(None, state, params, grad_fn=jax.grad(loss))
        return optax.apply_updates(params, updates), state

    for batch in batches:
        x = jax.make_array_from_process_local_data(split, batch[rows])
        params, state = step(params, state, x)
    for name in sorted(params):
        local = np.asarray(params[name].addressable_data(0))
        print(name, *(float(value).hex() for value in local.ravel()))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
