"""The trajectory of bSAM's public code, to 1e-9 in float64, on the problem beside it.

The file was made by ``build_bsam_optimizer`` of team-approx-bayes/bayesian-sam with JAX 0.4.35, as
it is, with ``msharpness=1``. Its ``normal_like_tree`` returned the numbers in ``noise`` in place of
a draw, and so does this library's generator here.
"""

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import x64
from test_golden import STEPS, assert_within, loss, read, tree

import sam_optax
from sam_optax._internal import noise


def bsam(hyper):
    options = {name: hyper[name] for name in ("data_size", "weight_decay", "damping")}
    options |= {"decay": hyper["beta2"], "initial_precision": hyper["s_init"], "key": 0}
    descent = optax.chain(
        optax.add_decayed_weights(hyper["weight_decay"]),
        optax.ema(hyper["beta1"], debias=False),
        sam_optax.scale_by_precision(),
    )
    method = sam_optax.bsam(hyper["rho"], **options)
    return sam_optax.sharpness_aware(optax.scale(-hyper["lr"]), method, descent=descent)


@pytest.fixture
def noise_of_the_file(monkeypatch):
    """Draws are looked up; the key counts them."""
    data, _ = read("bsam")

    def numbers(key, params, scale):
        del params, scale
        return jax.tree.map(lambda leaf: leaf[key[0]], tree(data, "noise"))

    monkeypatch.setattr(noise, "normal_tree", numbers)
    monkeypatch.setattr(noise, "first_key", lambda key: jnp.zeros(2, jnp.uint32))
    monkeypatch.setattr(noise, "next_key", lambda key: key + 1)


@pytest.mark.usefixtures("noise_of_the_file")
def test_bsam():
    with x64():
        data, hyper = read("bsam")
        tx = bsam(hyper)
        params = tree(data, "init")
        state = tx.init(params)
        step = jax.jit(
            lambda p, s, x, y: tx.update(None, s, p, grad_fn=lambda q: jax.grad(loss)(q, x, y))
        )
        for i in range(STEPS):
            updates, state = step(params, state, data["x"][i], data["y"][i])
            params = optax.apply_updates(params, updates)
            assert_within(params, tree(data, "params", i))
            assert_within(state.perturbation_state.precision, tree(data, "precision", i))
