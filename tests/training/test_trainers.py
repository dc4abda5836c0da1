"""The code of the page on trainers, run with every library that is installed.

None of them is needed for the other tests: ``pip install keras numpyro optimistix brax penzai``,
and, each in an environment of its own, ``pip install --pre levanter gitpython``,
``pip install kauldron``, ``pip install google-tunix``, ``pip install easydel pillow torch``; for
MaxText, ``pip install maxtext`` and what its imports ask for.
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
    names = run("optimistix_alternating", **run("optimistix"))
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


def test_levanter(tmp_path):
    pytest.importorskip("levanter")
    import haliax as hax
    from levanter.checkpoint import CheckpointerConfig
    from levanter.tracker import NoopConfig
    from levanter.trainer import TrainerConfig

    Batch, In, Out = hax.make_axes(batch=8, features=3, out=1)
    config = TrainerConfig(
        id="sam",
        num_train_steps=len(BATCHES),
        train_batch_size=Batch.size,
        tracker=NoopConfig(),
        log_dir=tmp_path,
        log_jaxprs=False,
        log_xla_hlo=False,
        checkpointer=CheckpointerConfig(base_path=str(tmp_path)),
    )
    named = [(hax.named(x, (Batch, In)), hax.named(y, (Batch, Out))) for x, y in BATCHES]

    def model_init():
        return hax.nn.Linear.init(In, Out, key=jax.random.key(0))

    names = run("levanter", config=config, batches=named, model_init=model_init)
    assert int(names["state"].opt_state.step) == len(BATCHES)
    assert_is_sam(
        names["state"].model,
        lambda params, batch: names["loss_fn"](params, batch)[0].scalar(),
        model_init(),
        named,
        names["AdamConfig"](learning_rate=0.05).build(len(BATCHES)),
    )


@pytest.fixture
def for_kauldron(tmp_path):
    """What its two blocks start with."""
    kd = pytest.importorskip("kauldron.kd")
    import flax.linen as nn

    class Model(nn.Module):
        x: kd.kontext.Key = kd.kontext.REQUIRED

        @nn.compact
        def __call__(self, x):
            return nn.Dense(1, name="dense")(x)

    x = np.asarray(X).reshape(-1, 3)
    data = {"x": x, "y": x @ np.asarray(TRUE)}
    return {"examples": lambda: data, "model": Model(x="batch.x"), "workdir": tmp_path}


def assert_kauldron_is_sam(params, trainer):
    def loss_fn(params, batch):
        x, y = batch
        return jnp.mean((x @ params["dense"]["kernel"] + params["dense"]["bias"] - y) ** 2)

    assert_is_sam(params, loss_fn, trainer.init_state().params, BATCHES, optax.adam(0.05))


def test_kauldron(for_kauldron):
    names = run("kauldron", **for_kauldron)
    assert int(names["state"].opt_state.step) == len(BATCHES)
    assert_kauldron_is_sam(names["weights"], names["trainer"])


def test_kauldron_step(for_kauldron):
    names = run("kauldron_step", **for_kauldron)
    assert int(names["state"].step) == len(BATCHES)
    assert_kauldron_is_sam(names["state"].params, names["trainer"])


@pytest.mark.parametrize("k", [None, 3])
def test_tunix(k):
    peft_trainer = pytest.importorskip("tunix.sft.peft_trainer")
    from flax import nnx

    def loss_fn(model, x, y):
        return jnp.mean((model(x) - y) ** 2)

    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    graph, start = nnx.split(model)
    start = jax.tree.map(jnp.copy, start)
    names = run(
        "tunix",
        model=model,
        loss_fn=loss_fn,
        config=peft_trainer.TrainingConfig(eval_every_n_steps=100, gradient_accumulation_steps=k),
        batches=[{"x": x, "y": y} for x, y in BATCHES],
    )
    k = k or 1
    assert names["trainer"].train_steps == 2 * len(BATCHES) // k
    together = [
        [jnp.concatenate(part) for part in zip(*BATCHES[i : i + k], strict=True)]
        for i in range(0, len(BATCHES), k)
    ]
    assert_is_sam(
        nnx.state(model),
        lambda params, batch: loss_fn(nnx.merge(graph, params), *batch),
        start,
        together,
        optax.adam(0.05),
    )


def test_a_resumed_tunix_trainer_takes_batches_repeated_beforehand(tmp_path):
    """Its first draws are of batches that the checkpoint has seen, without calls."""
    peft_trainer = pytest.importorskip("tunix.sft.peft_trainer")
    from flax import nnx

    tx = sam_optax.alternating(optax.adam(0.05), sam_optax.sam(rho=0.05))
    batches = [{"x": x, "y": y} for x, y in BATCHES]

    def trainer():
        config = peft_trainer.TrainingConfig(
            eval_every_n_steps=100, checkpoint_root_directory=str(tmp_path)
        )
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        return peft_trainer.PeftTrainer(model, tx, config).with_loss_fn(
            lambda model, x, y: jnp.mean((model(x) - y) ** 2)
        )

    first = trainer()
    first.train(sam_optax.repeat_batches(batches[:5], lambda: first.optimizer.opt_state))
    resumed = trainer()
    with pytest.raises(ValueError, match="from before the last call"):
        resumed.train(sam_optax.repeat_batches(batches, lambda: resumed.optimizer.opt_state))
    resumed = trainer()
    resumed.train(batch for batch in batches for _ in range(2))
    assert int(resumed.optimizer.opt_state.step[...]) == len(batches)


def test_easydel(tmp_path, monkeypatch):
    ed = pytest.importorskip("easydel")
    from datasets import Dataset
    from flax import nnx

    ids = np.random.default_rng(0).integers(0, 64, (12, 16))
    batches = np.split(ids, 3)
    twice = np.concatenate([batch for batch in batches for _ in range(2)])
    model = ed.LlamaForCausalLM(
        ed.LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=16,
        ),
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        rngs=nnx.Rngs(0),
    )
    # Adam divides by the size of the gradient, and so enlarges differences in rounding.
    sgd = optax.sgd(0.1)
    monkeypatch.setattr(
        ed.TrainingArguments,
        "get_optimizer_and_scheduler",
        lambda self, steps=None: (sgd, optax.constant_schedule(0.1)),
    )
    start = jax.device_get(nnx.state(model, nnx.Param))
    names = run(
        "easydel",
        model=model,
        dataset=Dataset.from_dict(
            {"input_ids": twice.tolist(), "attention_mask": np.ones_like(twice).tolist()}
        ),
        arguments={
            "save_directory": str(tmp_path),
            "num_train_epochs": 1,
            "total_batch_size": 4,
            "max_length": 16,
            "use_wandb": False,
            "do_last_save": False,
        },
    )
    state = names["state"]
    assert int(state.step) == 6
    assert int(jax.tree.leaves(state.opt_state.step)[0]) == 3

    def loss_fn(params, x):
        model = nnx.merge(state.graphdef, params, state.graphother)
        logits = model(input_ids=x, attention_mask=jnp.ones_like(x)).logits[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, x[:, 1:]).mean()

    with model.mesh:
        tokens = [jnp.asarray(batch) for batch in batches]
        assert_is_sam(names["weights"], loss_fn, start, tokens, sgd)


def test_maxtext(tmp_path, monkeypatch):
    """Two training steps, seen from outside: what the calls evaluate, and where they go."""
    maxtext = pytest.importorskip("maxtext")
    optimizers = pytest.importorskip("maxtext.optimizers.optimizers")
    train = pytest.importorskip("maxtext.trainers.pre_train.train")
    from flax import nnx

    monkeypatch.setattr(optimizers, "get_optimizer", optimizers.get_optimizer)
    states, metrics = [], []
    iteration = train.training_loop_iteration

    def watched(on_devices, *rest):
        states.append(jax.device_get(on_devices["state"]))
        metrics.append(iteration(on_devices, *rest))
        return metrics[-1]

    monkeypatch.setattr(train, "training_loop_iteration", watched)
    (package,) = maxtext.__path__
    arguments = (
        f"run_name=sam base_output_directory={tmp_path} hardware=cpu dataset_type=synthetic "
        "skip_jax_distributed_system=True enable_checkpointing=False enable_tensorboard=False "
        "enable_goodput_recording=False steps=5 base_emb_dim=16 base_mlp_dim=32 head_dim=8 "
        "base_num_decoder_layers=1 base_num_query_heads=2 base_num_kv_heads=2 vocab_size=64 "
        "max_target_length=16 per_device_batch_size=2 attention=dot_product dtype=float32 "
        "opt_type=sgd learning_rate=0.1 warmup_steps_fraction=0"
    ).split()
    run("maxtext", base_yml=f"{package}/configs/base.yml", arguments=arguments)
    steps = [jax.tree.leaves(state.optimizer.opt_state.step) for state in states]
    assert steps == [[0], [0], [1], [1], [2]]
    w, perturbed, new, new_perturbed, _ = (
        nnx.to_pure_dict(state.model.filter(nnx.Param)) for state in states
    )
    eps = jax.tree.map(np.subtract, perturbed, w)
    moved = jax.tree.map(np.subtract, new, w)
    grad_norm = [float(m["scalar"]["learning/raw_grad_norm"]) for m in metrics]
    loss = [float(m["scalar"]["learning/loss"]) for m in metrics]
    # ε is ρ along the gradient, and the step is −lr times the gradient at w + ε.
    np.testing.assert_allclose(optax.global_norm(eps), 0.05, rtol=1e-4)
    np.testing.assert_allclose(loss[1] - loss[0], 0.05 * grad_norm[0], rtol=0.02)
    np.testing.assert_allclose(optax.global_norm(moved), 0.1 * grad_norm[1], rtol=1e-4)
    again = jax.tree.map(np.subtract, new_perturbed, new)
    np.testing.assert_allclose(optax.global_norm(again), 0.05, rtol=1e-4)


# ------------------------------------------------------- the calls of trainers, without them


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
