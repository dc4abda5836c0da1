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
# Their libraries need environments, and versions of jax, of their own. The page names the versions
# with which each was run.
ELSEWHERE = ["levanter", "kauldron", "kauldron_step", "easydel", "maxtext", "tunix"]

# What other libraries warn of at their import is theirs.
pytestmark = pytest.mark.filterwarnings("default")

X = jnp.asarray(np.random.default_rng(0).normal(size=(12, 8, 3)), jnp.float32)
TRUE = jnp.array([[1.0], [-2.0], [0.5]])
BATCHES = [(x, x @ TRUE) for x in X]


def run(name: str, **names: Any) -> dict[str, Any]:
    """What the code of the page has defined, started with these names."""
    exec(compile(BLOCKS[name], f"docs: {name}", "exec"), names)
    return names


def assert_is_sam(
    found: Any, loss_fn: Any, start: Any, batches: Any, base: optax.GradientTransformation
) -> None:
    """One step of SAM (ρ = 0.05) on each batch, written without sam_optax, has led to ``found``.

    And the steps of the base optimizer lead elsewhere.
    """
    grad_fn = jax.grad(loss_fn)

    def after(rho: float) -> Any:
        params, state = start, base.init(start)
        for batch in batches:
            grads = grad_fn(params, batch)
            scale = rho / optax.global_norm(grads)
            perturbed = jax.tree.map(lambda w, g, scale=scale: w + scale * g, params, grads)
            updates, state = base.update(grad_fn(perturbed, batch), state, params)
            params = optax.apply_updates(params, updates)
        return params

    assert_close(found, after(0.05), rtol=1e-4, atol=1e-5)
    with pytest.raises(AssertionError):
        assert_close(found, after(0.0), rtol=1e-4, atol=1e-5)


def mean_square(w: jax.Array, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    x, y = batch
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
    tested = re.findall(r'\brun\(\s*"(\w+)"', pathlib.Path(__file__).read_text())
    assert {*tested, *ELSEWHERE} == set(BLOCKS)


@pytest.mark.parametrize("name", BLOCKS)
def test_every_block_uses_what_there_is(name):
    """Also where the library needs an environment of its own."""
    compile(BLOCKS[name], name, "exec")
    used = re.findall(r"\bsam_optax\.(\w+)", BLOCKS[name])
    assert [attribute for attribute in used if not hasattr(sam_optax, attribute)] == []


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


def test_keras_step_by_hand(keras):
    names = run("keras_step")
    params, fixed, opt_state = (names[name] for name in ("params", "fixed", "opt_state"))
    # BatchNorm has seen one pass of each step: its mean is that of the clean one.
    for x, y in BATCHES:
        _, once = names["model"].stateless_call(params, fixed, x, training=True)
        params, fixed, opt_state, _ = names["train_step"](params, fixed, opt_state, x, y)
        assert_close(fixed, once, rtol=1e-5, atol=1e-6)


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
    first = run("optimistix")
    for names in (first, run("optimistix_alternating", **first)):
        np.testing.assert_allclose(names["found"], names["target"], atol=1e-3)


def test_brax():
    gradients = pytest.importorskip("brax.training.gradients")
    plain, start = gradients.loss_and_pgrad, jnp.ones((3, 1))
    try:
        run("brax")
        # What BC and SAC call, and PPO with its own update.
        base = optax.sgd(0.1)
        update = gradients.gradient_update_fn(mean_square, base, None)
        value, w, _ = update(start, BATCHES[0], optimizer_state=base.init(None))
    finally:
        gradients.loss_and_pgrad = plain
    assert_is_sam(w, mean_square, start, BATCHES[:1], base)
    np.testing.assert_allclose(value, mean_square(start, BATCHES[0]), rtol=1e-6)


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
    assert_is_sam(names["trained"], mean_square, start, BATCHES, optax.sgd(0.1))


def test_the_generator_of_the_page_repeats():
    text = (DOCS / "trainers.md").read_text()
    (code,) = re.findall(r"  ```python\n(  def twice\(.*?)  ```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(re.sub(r"^  ", "", code, flags=re.MULTILINE), names)
    assert list(names["twice"]("ab")) == list("aabb")
    assert list(names["twice"]("ab", random_start=True)) == list("aaabb")
