"""Every method of the registry takes steps, and its own ones; each can be looked at in numbers."""

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close

import sam_optax
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.methods.method import Base, Step, check
from sam_optax.experiments.methods.registry import METHODS

pytestmark = pytest.mark.slow

KEY = jax.random.key(3)
X = jax.random.normal(jax.random.key(1), (40, 3))
Y = jax.random.randint(jax.random.key(2), (40,), 0, 2)
PARAMS = {"kernel": jnp.array([[0.5, -1.0], [1.0, 0.3], [-0.2, 0.1]]), "bias": jnp.zeros(2)}
BASE = Base(
    lambda rate: optax.sgd(rate, momentum=0.9),
    optax.constant_schedule(0.5),
    weight_decay=0.1,
    examples=40,
)
STEPS = 3


def losses_fn(params, batch):
    logits = batch[0] @ params["kernel"] + params["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1])


def batch(i):
    return X[10 * i : 10 * i + 10], Y[10 * i : 10 * i + 10]


def step(params, i):
    """What the trainer hands a method, on a batch."""

    def loss(params):
        return losses_fn(params, batch(i)).mean(), None

    value_and_grad_fn = jax.value_and_grad(loss, has_aux=True)
    key = jax.random.fold_in(KEY, i)
    return Step(losses_fn, value_and_grad_fn, params, batch(i), key, (X, Y), batch(max(i - 1, 0)))


def run(name, base=BASE, **hyperparameters):
    variant = METHODS[name].variant(**hyperparameters)
    tx = variant.transformation(base, KEY)

    @jax.jit
    def train(params):
        state = tx.init(params)
        for i in range(STEPS):
            params, state, _ = variant.update(tx, state, step(params, i))
        return params

    return train(PARAMS)


def loop(tx, **arguments):
    """What a user would write: the gradient on the batch, and further ``arguments(grad, i, w)``."""
    arguments = {"grad_fn": lambda grad, i, w: grad(batch(i)), **arguments}

    @jax.jit
    def train(params):
        state = tx.init(params)
        for i in range(STEPS):
            grad = lambda b: jax.grad(lambda p: losses_fn(p, b).mean())
            given = {name: of(grad, i, params) for name, of in arguments.items()}
            updates, state = tx.update(None, state, params, **given)
            params = optax.apply_updates(params, updates)
        return params

    return train(PARAMS)


def sharp(perturbation, base=BASE.tx, **options):
    return sam_optax.sharpness_aware(base, perturbation, **options)


SAM = sam_optax.sam(0.5)


def several(grad, i, w):
    """The batch, and two others as the trainer draws them."""
    rows = jax.random.choice(jax.random.fold_in(KEY, i), 40, (2, 10), replace=False)

    def mean(params):
        grads = [grad(b)(params) for b in (batch(i), *((X[row], Y[row]) for row in rows))]
        return jax.tree.map(lambda *leaves: sum(leaves) / 3, *grads)

    return mean


def leading(grad, i, params):
    """The Hessian's fifth power times the gradient."""
    flat, unravel = jax.flatten_util.ravel_pytree(params)
    flat_grad = lambda w: jax.flatten_util.ravel_pytree(grad(batch(i))(unravel(w)))[0]
    v = jnp.linalg.matrix_power(jax.jacobian(flat_grad)(flat), 5) @ flat_grad(flat)
    return unravel(v / jnp.linalg.norm(v))


def polyak_loop():
    """SAM-Polyak's step in plain arithmetic."""
    params = PARAMS
    for i in range(STEPS):
        loss = lambda p, i=i: losses_fn(p, batch(i)).mean()
        flat, unravel = jax.flatten_util.ravel_pytree(params)
        g = jax.flatten_util.ravel_pytree(jax.grad(loss)(params))[0]
        eps = 0.5 * g / jnp.linalg.norm(g)
        value, sharp = jax.value_and_grad(loss)(unravel(flat + eps))
        sharp = jax.flatten_util.ravel_pytree(sharp)[0]
        size = jnp.maximum(value - sharp @ eps, 0) / (sharp @ sharp)
        params = unravel(flat - jnp.minimum(size, 0.2) * sharp)
    return params


def along(params, direction, rho):
    norm = optax.tree.norm(direction)
    return jax.tree.map(lambda w, d: w + rho * d / jnp.where(norm > 0, norm, 1), params, direction)


def descend(sharp_of, decay=0.9):
    """SGD with momentum in plain arithmetic, along ``sharp_of(grad_fn, params, momentum)``."""
    params, momentum = PARAMS, jax.tree.map(jnp.zeros_like, PARAMS)
    for i in range(STEPS):
        grad_fn = jax.grad(lambda p, i=i: losses_fn(p, batch(i)).mean())
        sharp = sharp_of(grad_fn, params, momentum)
        momentum = jax.tree.map(lambda m, g: decay * m + g, momentum, sharp)
        params = jax.tree.map(lambda w, m: w - 0.5 * m, params, momentum)
    return params


def gam_loop():
    """GAM, but for the gradient's norm."""

    def sharp_of(grad_fn, params, _):
        steepness = jax.grad(lambda p: optax.tree.norm(grad_fn(p)))
        point = along(params, steepness(params), 0.5)
        total = lambda g, x: g + 0.7 * 0.5 * x
        return jax.tree.map(total, grad_fn(params), steepness(point))

    return descend(sharp_of)


def momentum_loop(rho, weight_decay=0.0, decay=0.9):
    """SGD at the point that is ρ along its own momentum."""

    def sharp_of(grad_fn, params, momentum):
        grads = grad_fn(along(params, momentum, rho))
        return jax.tree.map(lambda g, w: g + weight_decay * w, grads, params)

    return descend(sharp_of, decay)


def lookbehind_loop(rate=lambda i: 0.5):
    """Lookbehind-SAM with SGD, in plain arithmetic: k = 2, α = 0.4, ρ = 0.25."""
    params, momentum = PARAMS, jax.tree.map(jnp.zeros_like, PARAMS)
    for i in range(STEPS):
        grad_fn = jax.grad(lambda p, i=i: losses_fn(p, batch(i)).mean())
        point, fast = params, params
        for _ in range(2):
            point = along(point, grad_fn(point), 0.25)
            momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grad_fn(point))
            fast = jax.tree.map(lambda f, m, i=i: f - rate(i) * m, fast, momentum)
        params = jax.tree.map(lambda w, f: w + 0.4 * (f - w), params, fast)
    return params


def decayed(tx, weight_decay=0.1):
    return optax.chain(optax.add_decayed_weights(weight_decay), tx)


# As a user would write them; those that the library's own tests cover in this form are left out.
BY_HAND = {
    "gsam": lambda: loop(sharp(sam_optax.sam(0.8), descent=sam_optax.surrogate_gap(0.1))),
    "looksam": lambda: loop(
        sharp(sam_optax.sam(0.3), descent=sam_optax.reuse_orthogonal(0.7), when=sam_optax.every(5))
    ),
    "stable_sam": lambda: loop(sharp(SAM, descent=sam_optax.match_ascent_norm())),
    "wsam": lambda: loop(sharp(SAM, descent=sam_optax.mix_gradients(0.25))),
    "part": lambda: loop(
        sharp(sam_optax.sam(0.95)),
        ascent_grad_fn=lambda grad, i, w: grad((batch(i)[0][::5], batch(i)[1][::5])),
    ),
    "sam_full": lambda: loop(sharp(SAM), ascent_grad_fn=lambda grad, i, w: grad((X, Y))),
    "sam_batches": lambda: loop(sharp(SAM), ascent_grad_fn=several),
    "every": lambda: loop(sharp(sam_optax.sam(1.0), when=sam_optax.every(5))),
    "ss_sam": lambda: loop(sharp(SAM, when=sam_optax.bernoulli(0.5, key=KEY))),
    "wsam_decoupled": lambda: loop(
        sharp(SAM, optax.identity(), descent=sam_optax.decoupled_sharpness(BASE.tx, 0.5, 9.0))
    ),
    "vasso": lambda: loop(sharp(optax.chain(sam_optax.smooth_gradient(0.7), SAM))),
    "momentum": lambda: momentum_loop(0.3),
    "msam": lambda: momentum_loop(-2.0),
    "m_asam": lambda: loop(
        sharp(sam_optax.momentum_start(optax.chain(sam_optax.asam(5.0, 0.01), optax.scale(-1.0))))
    ),
    "xsam": lambda: loop(
        sharp(SAM, descent=sam_optax.toward_maximum(0.5)),
        value_fn=lambda grad, i, w: lambda p: losses_fn(p, batch(i)).mean(),
    ),
    "lookbehind": lookbehind_loop,
    "ae_sam": lambda: loop(sharp(SAM, when=sam_optax.above_average(1.0, 0.5))),
    "ada_sam": lambda: loop(sharp(SAM, decayed(optax.amsgrad(0.01)))),
    "light_sam": lambda: loop(
        sharp(
            optax.chain(optax.scale_by_rss(1e-8, 0.0), optax.scale(0.01)),
            decayed(optax.adagrad(0.01, 1e-8, eps=0.0)),
        )
    ),
    "bsam": lambda: loop(
        sharp(
            sam_optax.bsam(0.02, data_size=40, weight_decay=0.1, decay=0.9, key=KEY),
            optax.scale(-0.5),
            descent=decayed(
                optax.chain(optax.ema(0.8, debias=False), sam_optax.scale_by_precision())
            ),
        )
    ),
    "sampa": lambda: loop(
        sam_optax.simultaneous(BASE.tx, SAM, 0.4),
        previous_grad_fn=lambda grad, i, w: grad(batch(max(i - 1, 0))),
    ),
    "sam_polyak": polyak_loop,
    "x_sam": lambda: loop(
        sharp(SAM, descent=sam_optax.away_from_eigenvector(0.8)), eigenvector=leading
    ),
    "gam": gam_loop,
    "f_asam": lambda: loop(
        sharp(optax.chain(sam_optax.remove_full_gradient(1.0, 0.9), sam_optax.asam(2.0, 0.01)))
    ),
}
HYPER = {
    "sam_batches": {"batches": 3},
    "part": {"fraction": 0.2},
    "gsam": {"rho_max": 0.8, "rho_min": 0.2, "lr_max": 0.5},
    "looksam": {"rho": 0.3},
    "msam": {"rho": 2.0},
    "ae_sam": {"c": 1.0, "decay": 0.5},
    "vasso": {"theta": 0.3},
    "lookbehind": {"alpha": 0.4},
    "wsam": {"gamma": 0.2},
    "zsharp": {"quantile": 0.5},
    "ada_sam": {"rho": 0.5, "lr": 0.02},
    "light_sam": {"rho": 0.01, "lr": 0.02},
    "bsam": {"rho": 0.02, "lr": 1.0, "beta1": 0.8, "beta2": 0.9},
    "sampa": {"rho": 0.5, "lmbda": 0.4},
    "sam_polyak": {"rho": 0.5, "largest": 0.2},
    "x_sam": {"rho": 0.5, "alpha": 0.8},
    "gam": {"rho": 0.5, "alpha": 0.7},
}


@pytest.fixture(scope="module")
def trained():
    return {name: run(name, **HYPER.get(name, {})) for name in METHODS}


@pytest.mark.parametrize("name", METHODS)
def test_takes_steps_of_its_own(trained, name):
    leaves = jax.tree.leaves(trained[name])
    assert all(np.all(np.isfinite(leaf)) for leaf in leaves)
    if name != "sgd":
        others = {other: trained[other]["kernel"] for other in METHODS if other != name}
        assert not any(
            np.array_equal(kernel, trained[name]["kernel"]) for kernel in others.values()
        )


@pytest.mark.parametrize("name", BY_HAND)
def test_is_what_a_user_would_write(trained, name):
    assert_close(trained[name], BY_HAND[name](), 1e-6)


def test_one_batch_is_sam_and_as_many_as_there_are_is_the_full_gradient(trained):
    assert_close(run("sam_batches", batches=1), trained["sam"], 0)
    assert_close(run("sam_batches", batches=4), trained["sam_full"], 0)


def test_the_momentum_is_the_base_optimizer_s_with_what_it_adds_to_the_gradient(trained):
    base = BASE._replace(make=lambda rate: decayed(BASE.make(rate)))
    assert_close(run("msam", base, rho=2.0), momentum_loop(-2.0, weight_decay=0.1), 1e-5)
    assert_close(run("momentum", base), momentum_loop(0.3, weight_decay=0.1), 1e-5)
    with pytest.raises(AssertionError):
        assert_close(run("msam", base, rho=2.0), trained["msam"], 1e-2)


def test_without_momentum_of_gradients_there_is_an_average_of_them():
    plain = BASE._replace(make=optax.sgd, decay=0.0)
    assert_close(run("momentum", plain), momentum_loop(0.3, decay=0.0), 1e-6)
    rmsprop = BASE._replace(make=lambda _: optax.rmsprop(0.05, momentum=0.8), decay=0.8)
    by_hand = sharp(sam_optax.momentum_start(sam_optax.sam(0.3), 0.8), rmsprop.tx)
    assert_close(run("momentum", rmsprop), loop(by_hand), 1e-6)


def test_the_learning_rate_of_lookbehind_follows_the_training_steps():
    base = BASE._replace(learning_rate=lambda count: 0.5 / (1 + count))
    ours = run("lookbehind", base, alpha=0.4)
    assert_close(ours, lookbehind_loop(lambda i: 0.5 / (1 + i)), 1e-6)


def test_asam_does_not_normalize_biases_by_default(trained):
    def by_hand(biases):
        return loop(sharp(sam_optax.asam(2.0, 0.01, bias_mask={"kernel": False, "bias": biases})))

    assert_close(trained["asam"], by_hand(True), 1e-6)
    with pytest.raises(AssertionError):
        assert_close(trained["asam"], by_hand(False), 1e-2)


@pytest.mark.parametrize(
    "changes",
    [{"p": np.inf}, {"normalization": "filterwise"}, {"normalize_biases": True}],
    ids=lambda changes: next(iter(changes)),
)
def test_asam_s_options_are_the_library_s(changes):
    """An infinite p may be text, which results can hold."""
    biases = False if changes.pop("normalize_biases", None) else None
    given = {**changes, **({} if biases is None else {"normalize_biases": True})}
    by_hand = loop(sharp(sam_optax.asam(2.0, 0.01, **changes, bias_mask=biases)))
    text = {name: str(value) if name == "p" else value for name, value in given.items()}
    assert_close(run("asam", **text), by_hand, 1e-6)


def test_gradients_of_a_step_follow_the_hyperparameters():
    def gradients(name, **changes):
        return METHODS[name].variant(**changes).gradients(8.0)

    assert gradients("sam") == 2
    assert gradients("every", k=4) == 1.25
    assert gradients("sam_full") == gradients("sam_batches", batches=99) == 9
    assert gradients("sam_batches", batches=4) == 5
    assert gradients("lookbehind", k=3) == 4


def test_the_wrong_method_is_told_apart(trained):
    with pytest.raises(AssertionError):
        assert_close(trained["part"], BY_HAND["sam_full"](), 1e-6)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("sam", {"rho": -1.0}, r"--sam\.rho must be in \[0, inf\), got -1\.0"),
        ("part", {"fraction": 0.0}, r"--part\.fraction must be in \(0, 1\], got 0\.0"),
        ("asam", {"normalization": "x"}, r"--asam\.normalization must be 'elementwise' or 'filt"),
        ("sam_batches", {"batches": 0}, r"--sam-batches\.batches must be at least 1, got 0"),
        ("wsam", {"gamma": 1.0}, r"--wsam\.gamma must be in \[0, 1\), got 1\.0"),
        (
            "gsam",
            {"rho_max": 0.1, "rho_min": 0.2},
            r"--gsam\.rho_max must be in \[0\.2, inf\), got 0\.1",
        ),
        ("vasso", {"theta": 0.0}, r"--vasso\.theta must be in \(0, 1\], got 0\.0"),
        ("x_sam", {"iterations": 0}, r"--x-sam\.iterations must be at least 1, got 0"),
    ],
)
def test_what_the_library_refuses_names_the_option(name, wrong, message):
    with pytest.raises(UserError, match=message):
        check(name, METHODS[name].variant(**wrong))


def test_defaults_are_accepted():
    for name, method in METHODS.items():
        check(name, method.variant())


# A step in numbers, which is not taken.

UNSEEN = ("sgd", "sampa", "lookbehind")


def look(name, **hyperparameters):
    variant = METHODS[name].variant(**hyperparameters)
    state = variant.transformation(BASE, KEY).init(PARAMS)
    return variant.look(BASE, KEY, state, step(PARAMS, 0))


def test_sam_in_numbers():
    seen = look("sam", rho=0.3)
    grad = jax.grad(lambda p: losses_fn(p, batch(0)).mean())
    sam = sam_optax.sam(0.3)
    point, _ = sam.perturb_fn(PARAMS, grad(PARAMS), sam.init(PARAMS))
    g, sharp = (jax.flatten_util.ravel_pytree(grad(p))[0] for p in (PARAMS, point))
    assert float(seen.eps_norm) == pytest.approx(0.3, rel=1e-5)
    norm = jnp.linalg.norm
    np.testing.assert_allclose(seen.cosine, g @ sharp / norm(g) / norm(sharp), rtol=1e-5)
    rise = losses_fn(point, batch(0)).mean() - losses_fn(PARAMS, batch(0)).mean()
    np.testing.assert_allclose(seen.loss_rise, rise, rtol=1e-4)


@pytest.mark.parametrize("name", [name for name in METHODS if name not in UNSEEN])
def test_every_method_can_be_watched(name):
    seen = jax.eval_shape(lambda: look(name))
    assert {leaf.shape for leaf in seen} == {()}


@pytest.mark.parametrize("name", UNSEEN)
def test_what_is_not_sharpness_aware_has_nothing_to_show(name):
    assert look(name) is None


def test_the_full_gradient_is_that_of_all_examples_in_one_block_or_many(monkeypatch):
    from sam_optax.experiments.methods import method

    whole = step(PARAMS, 0).full_grad_fn(PARAMS)
    monkeypatch.setattr(method, "BLOCK", 3)  # 40 examples in 14 blocks
    assert_close(step(PARAMS, 0).full_grad_fn(PARAMS), whole, 1e-6)
    assert_close(whole, jax.grad(lambda p: losses_fn(p, (X, Y)).mean())(PARAMS), 1e-6)
