"""The tables by name of ``docs/methods.md``: every expression on recorded steps of the authors'
code, or against the equations in NumPy, in float64; and both costs of every row."""

import functools
import pathlib
import re
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import references_catalogue as paper
import references_family as family
from family import (
    BASE,
    CENTRES,
    LR,
    MATRIX,
    MOMENTUM,
    START,
    STEPS,
    as_tree,
    gap,
    gradient,
    numpy_gradients,
)
from helpers import vector, x64
from jax.flatten_util import ravel_pytree

import sam_optax
from sam_optax._internal import noise

sys.path.append(str(pathlib.Path(__file__).parents[1] / "golden"))
import authors

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "methods.md"
NUMBERS = {
    **{"rho": 0.3, "eta": 0.1, "sigma": 0.8, "lmbda": 0.7, "alpha": 0.4, "gamma": 0.75},
    **{"beta": 1.0, "tau": 0.1, "quantile": 0.5, "k": 3, "delta": 0.7, "lr": LR, "mu": MOMENTUM},
    **{"wd": 0.02, "v0": 0.01, "beta1": 0.8, "beta2": 0.7, "damping": 0.1, "n": 50.0, "b": 4},
    **{"radius": 0.5, "largest": 0.3, "theta": 0.4, "sparsity": 0.5, "M": 2, "N": 2, "tilt": 2.0},
    **{"limit": 9.0, "p": 0.5, "r": 0.2, "beta_0": 0.4, "beta_1": 0.6, "key": 0},
    **{"names": "ab", "labels": {"a": "a", "b": "b"}},
}
RHO, ALPHA, LMBDA = (NUMBERS[name] for name in ("rho", "alpha", "lmbda"))
OTHER = np.diag(np.linspace(0.2, 2.0, 9))  # of a second loss
EXAMPLES = np.linspace(-1, 1, 36).reshape(4, 9)  # of a batch: ℓ_i = |w|²/2 − ⟨x_i, w³⟩/3
LAYER = np.linspace(-0.5, 0.7, 45).reshape(5, 9)  # of a network
DRAWS = np.linspace(-0.2, 0.3, 18).reshape(2, 9)
FLAGS = np.array([True, False, True, True, False, True, True])


def rows():
    """Expression, arguments of ``update``, costs and source of each row of the tables."""
    found = {}
    for line in PAGE.read_text().split("## By name")[1].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and "`" in line and not line.startswith("| method"):
            codes = [code.strip("`") for code in cells[1].split("<br>")]
            codes = [*codes, "None, state, params, grad_fn=grad_fn"][:2]
            costs = [cost.strip() for cost in cells[3].split(";")]
            name = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", cells[0])
            assert name not in found
            found[name] = SimpleNamespace(
                tx=codes[0], arguments=codes[1], gradients=costs[0], flops=costs[1], source=cells[4]
            )
    return found


ROWS = rows()
FUNCTIONS = "\n".join(re.findall(r"^(?:>>>|\.\.\.) (.*)", PAGE.read_text(), re.MULTILINE))


def scope(name, numbers, base):
    """The names that an expression of the page uses, and ``tx``."""
    page = {"jax": jax, "jnp": jnp, "optax": optax}
    exec(FUNCTIONS, page)
    page |= {**numbers, "base": base}
    page["tx"] = eval(ROWS[name].tx, page)
    return page


def evaluate(code, page, params, **known):
    """An expression with a step's functions; those that evaluate a gradient, only if needed."""
    page = {**page, "params": params, **known}
    norm, grad_fn = page["norm"], page["grad_fn"]
    page["steepness"] = jax.grad(lambda p: norm(grad_fn(p)))
    page["above"] = lambda p, g: grad_fn(page["add"](p, g, page["r"] / norm(g)))
    if "g_1" in code:
        page["g"] = grad_fn(params)
        page["g_1"] = page["above"](params, page["g"])
    if "displacements" in code:
        method = sam_optax.sam(page["rho"])
        displaced = lambda draw: page["displaced"](method, params, grad_fn, draw)
        page["displacements"] = [displaced(draw) for draw in page["draws"]]
    return eval(code, page)


# ---- The problem in NumPy and in JAX


def numpy_loss(t):
    return lambda w: 0.5 * w @ MATRIX @ w + 0.075 * np.sum(w**4) - CENTRES[t] @ w + 3.0


def hessian(w):
    return MATRIX + np.diag(0.9 * w**2)


def eigenvector(w):
    """Of the largest eigenvalue; a sign that does not jump makes no difference to the test."""
    return np.linalg.eigh(hessian(w))[1][:, -1]


def jacobian(w):
    return (1 - np.tanh(LAYER @ w) ** 2)[:, None] * LAYER


def layers(flat):
    """The tree's leaves."""
    return [flat[:6].reshape(2, 3), flat[6:]]


seen = [0.0]  # gradients of the whole batch that compiled steps have evaluated


def count(share):
    jax.debug.callback(lambda: seen.__setitem__(0, seen[0] + share))


def counted(grad_fn, share=1.0):
    def counting(*args):
        count(share)
        return grad_fn(*args)

    return counting


def tapped(share):
    """The identity, whose backward pass counts."""

    def backward(_, g):
        count(share)
        return (g,)

    identity = jax.custom_vjp(lambda z: z)
    identity.defvjp(lambda z: (z, None), backward)
    return identity


def loss(params, t):
    w, _ = ravel_pytree(params)
    quadratic = 0.5 * w @ jnp.asarray(MATRIX) @ w - jnp.asarray(CENTRES)[t] @ w
    return tapped(1.0)(quadratic + 0.075 * jnp.sum(w**4) + 3.0)


def other(params):
    w, unravel = ravel_pytree(params)
    return unravel(jnp.asarray(OTHER) @ w - 1)


def losses_fn(params, batch):
    w, _ = ravel_pytree(params)
    return tapped(len(batch) / 4)(0.5 * jnp.sum(w**2) - batch @ w**3 / 3)


def logits(params):
    return tapped(1.0)(jnp.tanh(jnp.asarray(LAYER) @ ravel_pytree(params)[0]))


# The gradient function of each method that is not the family's.
OF_EXAMPLES = jax.grad(lambda p: jnp.mean(losses_fn(p, jnp.asarray(EXAMPLES))))
GRAD_FNS = {
    **dict.fromkeys(["ESAM", "ESAM, by leaf", "δ-SAM"], OF_EXAMPLES),
    "Functional SAM": jax.grad(lambda p: 0.5 * jnp.sum((logits(p) - 0.3) ** 2)),
}


def functions(name, t, stale, v):
    grad_fn = GRAD_FNS.get(name, counted(lambda p: gradient(p, t)))
    second = counted(other)
    known = {"grad_fn": grad_fn, "loss": lambda p: loss(p, t), "losses_fn": losses_fn}
    known |= {"batch": jnp.asarray(EXAMPLES), "logits": logits, "stale_grads": stale, "v": v}
    known |= dict.fromkeys(["focal_grad", "dominant_grad", "gnn_grad"], second)
    known |= dict.fromkeys(["others_grad", "mlp_grad", "private_grad", "previous_grad_fn"], grad_fn)
    known |= {"first_grad": counted(other, 0.5), "fisher": stale}
    known |= {"second_grad": counted(lambda p: gradient(p, t), 0.5)}
    known |= {"part_grad": counted(lambda p, i: gradient(p, t), 1 / NUMBERS["M"])}
    known |= {"loss_of_logits": lambda z: 0.5 * jnp.sum((z - 0.3) ** 2)}
    known |= {"draws": [as_tree(draw) for draw in DRAWS]}
    if name == "δ-SAM":  # its derivative needs losses that do not count
        weighted = sam_optax.reweighted_ascent
        plain = lambda p, x: (
            0.5 * jnp.sum(ravel_pytree(p)[0] ** 2) - x @ ravel_pytree(p)[0] ** 3 / 3
        )
        given = lambda fn, batch, key: counted(weighted(plain, batch, key=key))
        known |= {"reweighted_ascent": given}
    return known


@functools.cache
def trajectory(name):
    """w after each step of a row, and the number of gradients that each step has evaluated."""
    with x64():
        chosen = {"c": c, "bernoulli": lambda p, key: lambda step: jnp.asarray(FLAGS)[step]}
        numbers = {**NUMBERS, **chosen} if "bernoulli" in ROWS[name].tx else {**NUMBERS, "c": c}
        page = scope(name, numbers, BASE)
        tx = page["tx"]

        @jax.jit
        def step(params, state, stale, v, t):
            known = functions(name, t, stale, v)
            code = f"tx.update({ROWS[name].arguments})"
            updates, state = evaluate(code, page, params, state=state, **known)
            if isinstance(state, sam_optax.FirstPassState):
                state, _ = sam_optax.pop_first_pass(state)
            return optax.apply_updates(params, updates), state

        params, points, counts = as_tree(START), [], []
        state, stale = tx.init(params), jax.tree.map(jnp.zeros_like, params)
        for t in range(STEPS):
            seen[0] = 0.0
            before, v = params, as_tree(eigenvector(vector(params)))
            params, state = step(params, state, stale, v, jnp.asarray(t, jnp.int32))
            stale = gradient(before, t)
            jax.effects_barrier()
            points.append(vector(params))
            counts.append(seen[0])
    return points, counts


# ---- The equations


def momentum(gradient_of, gradients=None):
    """SGD with momentum, driven by a method."""
    return family.train(START, gradients or numpy_gradients(), gradient_of, LR, MOMENTUM)


def draws(method, params, update):
    """The normal numbers of a start, as they show themselves."""
    state = method.init(params)
    for _ in range(STEPS):
        yield vector(method.start_fn(params, state))
        _, state = method.update(params, state, params)


def bsam_noise():
    with x64():
        zeros = jax.tree.map(jnp.zeros_like, as_tree(START))
        options = {"data_size": 1.0, "weight_decay": 0.0, "decay": 0.0, "damping": 1.0}
        return list(draws(sam_optax.bsam(**options, key=0), zeros, None))


def direction():
    """δ-SAM's u, from the same key at every step."""
    with x64():
        return vector(noise.normal_tree(noise.first_key(0), as_tree(START), 1.0))


def c(step):
    return 1.2 - 0.4 * step


def example_losses(w):
    return 0.5 * np.sum(w**2) - EXAMPLES @ w**3 / 3


N = NUMBERS
GRADIENTS, LOSSES = numpy_gradients(), [numpy_loss(t) for t in range(STEPS)]
OF_LOSSES = lambda w: w - EXAMPLES * w**2
SECOND = lambda w: OTHER @ w - 1
AE_LOG = []
PAPERS = {
    "SAM": lambda: momentum(family.sam(RHO)),
    "ASAM, every leaf": lambda: momentum(paper.asam(RHO, N["eta"])),
    "F-SAM, paper's order": lambda: momentum(paper.f_sam(RHO, N["sigma"], LMBDA)),
    "Momentum-SAM": lambda: momentum(family.momentum_ascent(RHO, MOMENTUM, -1.0)),
    "LE-SAM": lambda: momentum(paper.le_sam(RHO, N["tau"])),
    "ZSharp": lambda: momentum(paper.zsharp(RHO, N["quantile"], layers)),
    "GC-SAM, paper": lambda: momentum(paper.gc_sam(RHO, layers)),
    "AE-SAM": lambda: momentum(paper.ae_sam(RHO, c, N["delta"], AE_LOG)),
    "AdaSAM": lambda: paper.ada_sam(START, GRADIENTS, RHO, LR, N["beta1"], N["beta2"], 0.1),
    "LightSAM": lambda: paper.light_sam(START, GRADIENTS, RHO, LR, N["v0"], np.sum),
    "LightSAM, by element": lambda: paper.light_sam(
        START, GRADIENTS, RHO, LR, N["v0"], lambda square: square
    ),
    "bSAM": lambda: paper.b_sam(
        START,
        GRADIENTS,
        bsam_noise(),
        rho=RHO,
        lr=LR,
        momentum=N["beta1"],
        decay=N["beta2"],
        weight_decay=N["wd"],
        damping=0.1,
        data_size=N["n"],
    ),
    "ESAM": lambda: momentum(paper.esam(RHO, 3, example_losses, OF_LOSSES), GRADIENTS),
    "AsyncSAM": lambda: momentum(paper.async_sam(RHO)),
    "SAM-Polyak": lambda: paper.sam_polyak(START, GRADIENTS, LOSSES, RHO, N["largest"]),
    "X-SAM": lambda: momentum(paper.x_sam(RHO, ALPHA, eigenvector)),
    "GAM": lambda: momentum(paper.gam(RHO, ALPHA, hessian)),
    "Functional SAM": lambda: momentum(
        paper.functional_sam(RHO, jacobian, lambda w: np.tanh(LAYER @ w) - 0.3)
    ),
    "M-SAM": lambda: two_losses(lambda grad: SECOND, lambda grad: grad),
    "FGSAM": lambda: two_losses(lambda grad: grad, lambda grad: lambda w: LMBDA * SECOND(w)),
    "FGSAM, its code's weights": lambda: two_losses(
        lambda grad: lambda w: LMBDA * grad(w), lambda grad: lambda w: (1 - LMBDA) * SECOND(w)
    ),
    "VaSSO, from zero": lambda: momentum(family.vasso(RHO, N["theta"])),
    "LayerSAM": lambda: momentum(paper.layer_sam(RHO, layers)),
    "Look-LayerSAM": lambda: momentum(paper.layer_sam(RHO, layers, N["k"], ALPHA)),
    "Eigen-SAM": lambda: momentum(paper.eigen_sam(RHO, ALPHA, eigenvector)),
    "K-SAM": lambda: momentum(paper.k_sam(RHO, N["k"], example_losses, OF_LOSSES)),
    "δ-SAM": lambda: momentum(paper.delta_sam(RHO, direction(), OF_LOSSES)),
    "SAM in spectral balls": lambda: momentum(paper.spectral_sam(RHO, layers)),
}


def two_losses(sharp, plain):
    """A method of two losses, with ε along the second; one of them changes with the batch."""
    of_step = [paper.of_two_losses(RHO, SECOND, sharp(grad), plain(grad)) for grad in GRADIENTS]
    return momentum(lambda t, w, grad: of_step[t](t, w, grad))


@pytest.mark.parametrize("name", PAPERS)
def test_the_expression_is_the_papers_method(name):
    expected = PAPERS[name]()
    assert gap(trajectory(name)[0], expected) < 1e-9
    # None of them is SAM, or a smaller gap would say little.
    assert name == "SAM" or gap(expected, PAPERS["SAM"]()) > 1e-4


def test_a_bias_is_not_normalized():
    """The case on which an implementation of T for every leaf shows itself."""
    params = {"kernel": jnp.array([1.0, 2.0]), "bias": jnp.zeros(2)}
    method = sam_optax.asam(rho=0.5, eta=0.01)
    epsilon, _ = method.update(jax.tree.map(jnp.ones_like, params), method.init(params), params)
    np.testing.assert_allclose(epsilon["bias"], 0.18817, atol=5e-6)


# ---- The recorded steps: the runs, "method" or "method variant", and the page's numbers in terms
# of the code's.

GOLDEN = {
    "SAM": (["sam"], {}),
    "ASAM": (["asam"], {}),
    "F-SAM": (["fsam"], {}),
    "GSAM": (["gsam", "gsamjax"], {"rho": "rho_max"}),
    "LookSAM": (["looksam global"], {"k": "int(k)"}),
    "LookSAM, by leaf": (["looksam"], {"k": "int(k)"}),
    "WSAM": (["wsam"], {}),
    "WSAM, coupled": (["wsam coupled"], {}),
    "Momentum-SAM, decay at w + ε": (["msam"], {"mu": "momentum"}),
    "Momentum-SAM, AdamW": (["msam"], {}),
    "Stable SAM (SSAM)": (["ssam"], {}),
    "ZSharp, by kernel": (["zsharp"], {"quantile": "alpha"}),
    "GC-SAM": (["gcsam"], {}),
    "SAMPa": (["sampa"], {"lmbda": "og"}),
    "ESAM, by leaf": (["esam"], {"gamma": "(int(16 * gamma) - 1) / 16"}),
    "Lookbehind-SAM": (["lookbehind"], {"k": "int(k_steps)"}),
    "Lookbehind-SAM, adaptive": (["lookbehind adaptive"], {"k": "int(k_steps)"}),
    "XSAM": (["xsam"], {"rho": "rho_total", "radius": "rho_max", "k": "4"}),
    "GAM, accelerated": (
        ["gam"],
        {
            **{"rho": "grad_norm_rho", "r": "grad_rho", "gamma": "grad_gamma"},
            **{"beta_0": "grad_beta_0", "beta_1": "grad_beta_1"},
        },
    ),
    "Focal-SAM": (["focalsam"], {}),
    "VaSSO": (["vasso"], {}),
    "Fisher SAM": (["fishersam"], {}),
    "Sparse SAM": (["sparsesam f"], {"sparsity": "1 - int(66 * (1 - sparsity)) / 66", "k": "4"}),
    "USAM": (["usam"], {}),
    "USAM, clipped": (["usamclip"], {}),
    "SAM-ON": (["samon_ln sam_only_norm"], {}),
    "AWP": (["awp"], {}),
    "LPF-SGD": (["lpfsgd_m4"], {"gamma": "std", "M": "int(M)"}),
    "RWP": (["rwp"], {}),
    "SAGM": (["sagm"], {}),
    "CR-SAM": (["crsam"], {}),
    "TSAM": (["tsam"], {}),
    "RST (SS-SAM)": (
        ["rst"],
        {"rho": "r", "limit": "gradient_clipping", "wd": "l2_regularization"},
    ),
    "G-RST": (["grst"], {"rho": "r", "limit": "gradient_clipping", "wd": "l2_regularization"}),
    "DP-SAT": (["dpsat"], {}),
    "DP-SAT, momentum": (["dpsatmom"], {}),
}
BASES = {"SGD": "sgd", "momentum": "momentum", "Nesterov": "nesterov", "AdamW": "adamw"}
# Methods of decay that is not the base optimizer's, where this is not AdamW.
OWN_DECAY = ["AWP", "RST (SS-SAM)", "G-RST"]


def runs(name):
    """The recorded runs that the page names, as (method, run)."""
    _, found, bases = ROWS[name].source.partition("exact, ")
    chosen = list(BASES) if bases == "all" else bases.split(", ")
    assert found, name
    for method in GOLDEN[name][0]:
        method, _, variant = method.partition(" ")
        for base in chosen:
            yield method, "_".join(filter(None, [variant, BASES[base]]))


def private(h, b, params):
    """The sum of clipped gradients of the examples, and noise: DP-SGD's."""
    one = lambda x, y: jax.grad(lambda p: authors.losses_fn(p, (x, y)))(params)
    grads = jax.vmap(one)(*b.examples)
    share = jnp.minimum(1, h.max_grad_norm / (jax.vmap(authors.norm)(grads) + 1e-6))
    total = jax.tree.map(lambda g: jnp.tensordot(share, g, 1), grads)
    draw = authors.unflatten(b.at(h.z) * h.noise_multiplier * h.max_grad_norm)
    return authors.scaled(authors.add(total, draw), 1 / h.expected_batch_size)


def followed(name, method):
    """The row as an expression of ``authors.distance``."""

    def expression(h, base):
        if name in OWN_DECAY and h.base != "adamw":
            base = authors.torch_base(h, weight_decay=0.0)
        page = {**NUMBERS, "wd": getattr(h, "weight_decay", 0.0), **vars(h)}
        page |= {"names": "abcd", "labels": authors.LEAVES}
        page |= {ours: eval(theirs, vars(h).copy()) for ours, theirs in GOLDEN[name][1].items()}
        if hasattr(h, "sam_flag"):
            page |= {"bernoulli": lambda p, key: lambda step: jnp.asarray(h.sam_flag)[step]}
        page = scope(name, page, base)

        def given(b, params):
            known = {"grad_fn": b.grad, "previous_grad_fn": b.before().grad, "loss": b.loss}
            known |= {"losses_fn": authors.losses_fn, "batch": b.examples}
            known |= {"first_grad": b.part(0, 2), "second_grad": b.part(1, 2)}
            known |= {"part_grad": lambda p, i: b.part(i, int(h.M))(p)}
            if name == "Focal-SAM":
                counts = jnp.asarray(authors.file(method)["cls_num_list"])
                share = (1 - counts / counts.sum()) ** h.flat_gamma
                known |= {"focal_grad": b.weighted(h.sharpness * share)}
            if name.startswith("DP-SAT"):
                known |= {"private_grad": lambda p: private(h, b, p)}
            if hasattr(h, "mask"):
                known |= {"fisher": authors.unflatten(b.at(h.mask).astype(jnp.float64))}
            if name == "TSAM":
                clip = lambda z: optax.clip_by_global_norm(h.radius).update(z, None)[0]
                scaled = [authors.unflatten(h.scaling * z) for z in b.at(h.z)]
                known |= {"draws": [clip(z) for z in scaled]}
            code = "(lambda grads, state, params, **named: {'grads': grads, **named})"
            return evaluate(f"{code}({ROWS[name].arguments})", page, params, state=None, **known)

        return page["tx"], given

    return expression


RUNS = [(name, *run) for name in GOLDEN for run in runs(name)]
DAILY = {"SAM", "ASAM", "F-SAM", "GSAM", "LookSAM"}  # with momentum


@pytest.mark.parametrize(
    ("name", "method", "run"),
    [
        pytest.param(*r, marks=[] if r[0] in DAILY and "momentum" in r[2] else pytest.mark.slow)
        for r in RUNS
    ],
)
def test_the_expression_follows_the_authors_code(monkeypatch, name, method, run):
    with x64():
        distance = authors.distance(monkeypatch, method, run, followed(name, method))
    assert distance < authors.TOLERANCE.get(method, 1e-11)


def test_the_page_names_what_is_recorded():
    """Repositories, revisions, and all base optimizers that the expression follows."""
    for name, (methods, _) in GOLDEN.items():
        for method in methods:
            key = method.partition(" ")
            h, _, _ = authors.read(key[0], next(run for m, run in runs(name) if m == key[0]))
            named = re.findall(r"(\S+)@(\w{7})\b", ROWS[name].source)
            repository, revision = re.match(r"(\S+)@(\w{7})", h.source).groups()
            assert (repository, revision) in named, name


def test_every_row_is_compared():
    assert set(ROWS) == set(PAPERS) | set(GOLDEN)
    exact = {name for name, row in ROWS.items() if "exact" in row.source}
    assert exact == set(GOLDEN)


# ---- The costs


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.slow
def test_the_number_of_gradients_is_that_of_the_page(name):
    """Behind the first step, in which some methods have nothing to ascend along."""
    shares = {"AE-SAM": AE_LOG}.get(name, FLAGS)
    if name == "AE-SAM":
        AE_LOG.clear()
        PAPERS[name]()
        assert {True, False} <= set(AE_LOG)
    expected = eval(ROWS[name].gradients, {**NUMBERS, "share": np.mean(shares[1:])})
    np.testing.assert_allclose(np.mean(trajectory(name)[1][1:]), expected, rtol=1e-6)


def flops(name):
    """XLA's count for an MLP 256-256-10 and 256 examples, relative to SGD with momentum."""
    sizes = {"fc1": (256, 256), "fc2": (256, 10)}
    params = {
        layer: {"kernel": jnp.ones((n, m)), "bias": jnp.ones(m)} for layer, (n, m) in sizes.items()
    }
    x, y = jnp.ones((1, 256, 256)), jnp.zeros((1, 256), jnp.int32)
    b = authors.Batch(x, y, 0)
    second = b.weighted(jnp.linspace(0, 1, 10))
    page = {**NUMBERS, "gamma": 0.5, "c": c, "names": "abcd", "labels": authors.LEAVES}
    page = scope(name, page, BASE)

    def known(params):
        of_logits = lambda z: optax.softmax_cross_entropy_with_integer_labels(z, y[0]).mean()
        found = {"grad_fn": b.grad, "loss": b.loss, "losses_fn": authors.losses_fn}
        found |= {"batch": b.examples, "loss_of_logits": of_logits}
        found |= {"logits": lambda p: authors.network(p, x[0])}
        found |= dict.fromkeys(["stale_grads", "v", "fisher"], params)
        found |= dict.fromkeys(["focal_grad", "dominant_grad"], second)
        found |= dict.fromkeys(["others_grad", "previous_grad_fn"], b.grad)
        found |= {"first_grad": b.part(0, 2), "second_grad": b.part(1, 2)}
        return found | {"draws": [page["scaled"](params, i + 1.0) for i in range(NUMBERS["N"])]}

    def step(params, state):
        code = f"tx.update({ROWS[name].arguments})"
        updates, state = evaluate(code, page, params, state=state, **known(params))
        return optax.apply_updates(params, updates), state

    def plain(params, state):
        updates, state = BASE.update(b.grad(params), state, params)
        return optax.apply_updates(params, updates), state

    def cost(step, tx):
        compiled = jax.jit(step).lower(params, tx.init(params)).compile()
        return compiled.cost_analysis()["flops"]

    return cost(step, page["tx"]) / cost(plain, BASE)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.flops != "–"])
@pytest.mark.slow
def test_the_flops_are_those_of_the_page(name):
    assert flops(name) == pytest.approx(eval(ROWS[name].flops, dict(NUMBERS)), abs=0.03)
