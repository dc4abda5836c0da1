"""One process of a training run: started by ``test_processes.py`` once, or twice side by side.

Usage: two_processes.py METHOD PROCESS_ID NUM_PROCESSES PORT
"""

import sys

import jax

METHOD, PROCESS, COUNT, PORT = sys.argv[1], *map(int, sys.argv[2:])
if COUNT > 1:
    jax.distributed.initialize(
        f"127.0.0.1:{PORT}", COUNT, PROCESS, initialization_timeout=60, local_device_ids=[0]
    )

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import sam_optax  # noqa: E402

KEY = jax.random.PRNGKey(0)
METHODS = {
    "sam": lambda: sam_optax.sam(0.1),
    "fsam": lambda: sam_optax.fsam(0.1),
    "rsam": lambda: sam_optax.rsam(0.1, key=KEY),
}
tx = sam_optax.sharpness_aware(optax.sgd(0.1, momentum=0.9), METHODS[METHOD]())
mesh = Mesh(np.array(jax.devices()[:COUNT]), ("batch",))
replicated, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("batch"))
batches = np.random.default_rng(0).normal(size=(5, 8, 4)).astype(np.float32)
rows = slice(PROCESS * 8 // COUNT, (PROCESS + 1) * 8 // COUNT)
params = {"kernel": np.full((4, 3), 0.5, np.float32), "bias": np.zeros(3, np.float32)}
params = jax.tree.map(lambda x: jax.make_array_from_process_local_data(replicated, x), params)
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
