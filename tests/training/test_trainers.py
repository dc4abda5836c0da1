"""The code of the page on trainers, run with every library that is installed.

None of them is needed for the other tests: ``pip install keras numpyro optimistix brax penzai``.
"""

import pathlib
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close

import sam_optax

DOCS = pathlib.Path(__file__).parents[2] / "docs"
MARKED = r"<!-- run with: (\w+) -->\n```python\n(.*?)```"
BLOCKS = {
    name: code
    for page in ("trainers.md", "frameworks.md")
    for name, code in re.findall(MARKED, (DOCS / page).read_text(), re.DOTALL)
}

# What other libraries warn of at their import is theirs.
pytestmark = pytest.mark.filterwarnings("default")

X = jnp.asarray(np.random.default_rng(0).normal(size=(12, 8, 3)), jnp.float32)
TRUE = jnp.array([[1.0], [-2.0], [0.5]])
BATCHES = [(x, x @ TRUE) for x in X]


def run(name: str, **names: Any) -> dict[str, Any]:
    """What the code of the page has defined, started with these names."""
    exec(compile(BLOCKS[name], f"docs: {name}", "exec"), names)
    return names


def mean_square(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((x @ w - y) ** 2)


@pytest.fixture
def keras(monkeypatch):
    if "keras" not in sys.modules:
        monkeypatch.setenv("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "jax":
        pytest.skip("Keras was imported with another backend")
    keras.utils.set_random_seed(0)
    return keras


def test_every_block_that_is_marked_is_tested():
    """And none is tested that the pages no longer have."""
    tested = re.findall(r'\brun\(\s*"(\w+)"', pathlib.Path(__file__).read_text())
    assert set(tested) == set(BLOCKS)


def test_keras_fit(keras):
    batches = [(np.asarray(x), np.asarray(jnp.sin(y))) for x, y in BATCHES]
    names = run("keras_fit", batches=batches)
    model, state = names["model"], names["model"].optimizer.state
    assert int(state.step) == 3 * len(batches)
    assert names["history"].history["loss"][0] < 0.5
    # The weights are w, not where the last call has led; a model that is loaded has them all.
    assert_close([v.value for v in model.trainable_variables], state.params, rtol=0)
    x, y = (np.concatenate(part) for part in zip(*batches, strict=True))
    found = model.evaluate(x, y, verbose=0)
    np.testing.assert_allclose(found, np.mean((model(x) - y) ** 2), rtol=1e-4)


def test_keras_steps_are_those_of_alternating(keras):
    """One linear layer, by the optimizer of the page and by hand."""
    tx = sam_optax.alternating(optax.sgd(0.1, momentum=0.9), sam_optax.sam(0.05))
    batches = [(np.asarray(x), np.asarray(y)) for x, y in BATCHES]
    optimizer_of = run("keras_fit", batches=batches[:1])["Optax"]
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(optimizer=optimizer_of(tx), loss="mse")
    w = jnp.array(model.trainable_variables[0].value)  # fit donates the model's own
    twice = (batch for batch in batches for _ in range(2))
    model.fit(twice, steps_per_epoch=2 * len(batches), verbose=0)
    state = tx.init(w)
    for batch in (batch for batch in BATCHES for _ in range(2)):
        updates, state = tx.update(jax.grad(mean_square)(w, *batch), state, w)
        w = optax.apply_updates(w, updates)
    (found,) = sam_optax.eval_params(
        [v.value for v in model.trainable_variables], model.optimizer.state
    )
    assert_close(found, sam_optax.eval_params(w, state), rtol=1e-4, atol=1e-5)


def test_keras_step_by_hand(keras):
    names = run("keras_step")
    carry, losses = [names[name] for name in ("params", "fixed", "opt_state")], []
    fixed = carry[1]
    x = X.reshape(-1, 3)
    for _ in range(60):
        *carry, loss = names["train_step"](*carry, x, x @ TRUE)
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]
    # BatchNorm has seen one pass of each step: its mean is that of the clean one.
    x, y = BATCHES[0]
    params, opt_state = carry[0], carry[2]
    new_fixed = names["train_step"](params, fixed, opt_state, x, y)[1]
    _, once = names["model"].stateless_call(params, fixed, x, training=True)
    assert_close(new_fixed, once, rtol=1e-5, atol=1e-6)


def test_numpyro():
    numpyro = pytest.importorskip("numpyro")
    import numpyro.distributions as dist
    from numpyro.infer.autoguide import AutoNormal

    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal(jnp.zeros(3), 1.0).to_event(1))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w, 0.3), obs=y)

    x = X.reshape(-1, 3)
    names = run("numpyro", model=model, guide=AutoNormal(model), x=x, y=(x @ TRUE)[:, 0])
    np.testing.assert_allclose(names["result"].params["w_auto_loc"], TRUE[:, 0], atol=0.1)
    # The two gradients of a step are of one function: the ELBO with this step's key.
    state, losses = names["optimizer"].init({"w": jnp.ones(2)}), []

    def fn(params):
        jax.debug.callback(losses.append, params["w"])
        return jnp.sum(params["w"] ** 2), None

    names["optimizer"].eval_and_update(fn, state)
    jax.effects_barrier()
    eps = np.asarray(losses[1]) - np.asarray(losses[0])
    np.testing.assert_allclose(np.linalg.norm(eps), 0.05, rtol=1e-4)


def test_optimistix():
    pytest.importorskip("optimistix")
    names = run("optimistix")
    np.testing.assert_allclose(names["found"], names["target"], atol=1e-3)


def test_optimistix_first_step():
    """The first step is that of ``sharpness_aware`` with ``grad_fn``."""
    optimistix = pytest.importorskip("optimistix")
    loss, tx = (run("optimistix")[name] for name in ("loss", "tx"))
    y0, target = jnp.zeros(2), jnp.array([1.0, 2.0])
    solver = optimistix.OptaxMinimiser(tx, rtol=1e-5, atol=1e-5)
    first = optimistix.minimise(loss, solver, y0, args=target, max_steps=1, throw=False).value
    updates, _ = tx.update(None, tx.init(y0), y0, grad_fn=jax.grad(lambda w: loss(w, target)))
    assert_close(first, optax.apply_updates(y0, updates), rtol=1e-6)
    plain = y0 - 0.1 * jax.grad(loss)(y0, target)
    assert float(jnp.max(jnp.abs(first - plain))) > 1e-3


def test_optimistix_alternating():
    pytest.importorskip("optimistix")
    names = run("optimistix_alternating")
    np.testing.assert_allclose(names["found"], names["target"], atol=1e-3)


def test_brax():
    gradients = pytest.importorskip("brax.training.gradients")
    plain = gradients.loss_and_pgrad
    try:
        run("brax")
        # What BC and SAC call, and PPO with its own update.
        update = gradients.gradient_update_fn(mean_square, optax.sgd(0.1), None)
        x, y = BATCHES[0]
        value, w, _ = update(jnp.ones((3, 1)), x, y, optimizer_state=optax.sgd(0.1).init(None))
    finally:
        gradients.loss_and_pgrad = plain
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.sam(rho=0.05))
    start = jnp.ones((3, 1))
    grad_fn = jax.grad(lambda w: mean_square(w, x, y))
    updates, _ = tx.update(None, tx.init(start), start, grad_fn=grad_fn)
    assert_close(w, optax.apply_updates(start, updates), rtol=1e-5)
    np.testing.assert_allclose(value, mean_square(start, x, y), rtol=1e-6)


def test_penzai():
    pytest.importorskip("penzai")
    from penzai import pz

    model = pz.nn.Linear.from_config(
        "linear", jax.random.key(0), input_axes={"in": 3}, output_axes={"out": 1}
    )
    (start,) = jax.tree.leaves(pz.freeze_params(pz.unbind_params(model)[1]))

    def loss_fn(model, state, rng, x, y):
        predictions = model(pz.nx.wrap(x).tag("batch", "in")).untag("batch", "out").unwrap()
        loss = jnp.mean((predictions - y) ** 2)
        return loss, state, {"loss": loss}

    names = run("penzai", model=model, loss_fn=loss_fn, batches=BATCHES)
    assert len(names["losses"]) == 2 * len(BATCHES)
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.sam(rho=0.05))
    w, state = start, tx.init(start)
    for x, y in BATCHES:
        grad_fn = jax.grad(lambda w: mean_square(w, x, y))  # noqa: B023
        updates, state = tx.update(None, state, w, grad_fn=grad_fn)
        w = optax.apply_updates(w, updates)
    assert_close(jax.tree.leaves(names["trained"]), [w], rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- trainers that were read


@pytest.mark.parametrize("combinator", ["sharpness_aware", "alternating"])
def test_easydels_keywords(combinator):
    """EasyDeL calls ``update`` by keywords throughout."""
    tx = getattr(sam_optax, combinator)(optax.sgd(0.1), sam_optax.sam(0.05))
    w = jnp.array([3.0, 4.0])
    grad_fn = {} if combinator == "alternating" else {"grad_fn": lambda w: w}
    by_name, _ = tx.update(updates=w, state=tx.init(w), params=w, **grad_fn)
    by_position, _ = tx.update(w, tx.init(w), w, **grad_fn)
    assert_close(by_name, by_position, rtol=0)


def test_levanters_call():
    """Levanter passes ``params``, ``obj_fn`` and ``loss`` by keyword, and no ``grad_fn``."""
    tx = sam_optax.sharpness_aware(optax.sgd(0.1), sam_optax.sam(rho=0.1))
    w = jnp.array([3.0, 4.0])

    def obj_fn(w):
        return 0.5 * jnp.sum(w**2)

    updates, _ = jax.jit(lambda w: tx.update(w, tx.init(w), params=w, obj_fn=obj_fn, loss=12.5))(w)
    np.testing.assert_allclose(updates, [-0.306, -0.408], rtol=1e-5)


def test_the_generator_of_the_page_repeats():
    text = (DOCS / "trainers.md").read_text()
    (code,) = re.findall(r"  ```python\n(  def twice\(.*?)  ```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(re.sub(r"^  ", "", code, flags=re.MULTILINE), names)
    assert list(names["twice"]("ab")) == list("aabb")
    assert list(names["twice"]("ab", random_start=True)) == list("aaabb")
