"""The tables of ``docs/catalogue.md``: each expression against the paper's equations in float64."""

import pathlib
import re

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

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "catalogue.md"
NUMBERS = {
    "rho": 0.3,
    "eta": 0.1,
    "sigma": 0.8,
    "lmbda": 0.7,
    "alpha": 0.4,
    "gamma": 0.6,
    "tau": 0.1,
    "quantile": 0.5,
    "k": 3,
    "delta": 0.7,
    "lr": LR,
    "v0": 0.01,
    "wd": 0.02,
    "beta": 1.0,
    "beta1": 0.8,
    "beta2": 0.7,
    "n": 50.0,
    "radius": 0.5,
    "largest": 0.3,
    "key": 0,
}
R = {name: NUMBERS[name] for name in ("rho", "alpha", "lmbda")}
OTHER = np.diag(np.linspace(0.2, 2.0, 9))  # of a second loss
EXAMPLES = np.linspace(-1, 1, 36).reshape(4, 9)  # of a batch: ℓ_i = |w|²/2 − ⟨x_i, w³⟩/3
LAYER = np.linspace(-0.5, 0.7, 45).reshape(5, 9)  # of a network


def c(step):
    return 1.2 - 0.4 * step


def numpy_loss(t):
    return lambda w: 0.5 * w @ MATRIX @ w + 0.075 * np.sum(w**4) - CENTRES[t] @ w + 3.0


def loss(params, t):
    w, _ = ravel_pytree(params)
    quadratic = 0.5 * w @ jnp.asarray(MATRIX) @ w - jnp.asarray(CENTRES)[t] @ w
    return quadratic + 0.075 * jnp.sum(w**4) + 3.0


def hessian(w):
    return MATRIX + np.diag(0.9 * w**2)


def eigenvector(w):
    """Of the largest eigenvalue; a sign that does not jump makes no difference to the test."""
    return np.linalg.eigh(hessian(w))[1][:, -1]


def other(params):
    w, unravel = ravel_pytree(params)
    return unravel(jnp.asarray(OTHER) @ w - 1)


def norm(tree):
    return jnp.linalg.norm(ravel_pytree(tree)[0])


def losses_fn(params, batch):
    w, _ = ravel_pytree(params)
    return 0.5 * jnp.sum(w**2) - batch @ w**3 / 3


def logits(params):
    return jnp.tanh(jnp.asarray(LAYER) @ ravel_pytree(params)[0])


def jacobian(w):
    return (1 - np.tanh(LAYER @ w) ** 2)[:, None] * LAYER


def layers(flat):
    """The tree's leaves."""
    return [flat[:6].reshape(2, 3), flat[6:]]


# The gradient function of each method that is not the family's.
GRAD_FNS = {
    "ESAM": jax.grad(lambda p: jnp.mean(losses_fn(p, jnp.asarray(EXAMPLES)))),
    "Functional SAM": jax.grad(lambda p: 0.5 * jnp.sum((logits(p) - 0.3) ** 2)),
}


def rows():
    """Method, expression and arguments of ``update`` of each row of the tables."""
    found = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ["):
            codes = [code.strip("`") for code in cells[1].split("<br>")]
            default = "None, state, params, grad_fn=grad_fn"
            found[re.match(r"\[(.*?)\]", cells[0])[1]] = [*codes, default][:2]
    return found


ROWS = rows()


def trajectory(name):
    """w after each step, of the expression on the page."""
    expression, arguments = ROWS[name]
    page = {**vars(sam_optax), **NUMBERS, "optax": optax, "jax": jax, "jnp": jnp, "base": BASE}
    page |= {"c": c, "losses_fn": losses_fn, "logits": logits}
    exec("\n".join(re.findall(r"^(?:>>>|\.\.\.) (.*)", setup(), re.MULTILINE)), page)
    with x64():
        page["batch"] = jnp.asarray(EXAMPLES)
        tx = eval(expression, page)

        @jax.jit
        def step(params, state, stale, v, t):
            grad_fn = GRAD_FNS.get(name, lambda p: gradient(p, t))
            local = {"state": state, "params": params, "grad_fn": grad_fn}
            local |= {"steepness": jax.grad(lambda p: norm(grad_fn(p)))}
            local |= {"focal_grad": other, "dominant_grad": other, "others_grad": grad_fn}
            local |= {"previous_grad_fn": grad_fn}  # of one batch; the golden files have two
            local |= {"gnn_grad": other, "mlp_grad": grad_fn, "stale_grads": stale, "v": v}
            local |= {"loss": lambda p: loss(p, t)}
            local |= {"loss_of_logits": lambda z: 0.5 * jnp.sum((z - 0.3) ** 2)}
            updates, state = eval(f"tx.update({arguments})", {**page, **local, "tx": tx})
            if isinstance(state, sam_optax._combinators.first_pass.FirstPassState):
                state, _ = sam_optax.pop_first_pass(state)
            return optax.apply_updates(params, updates), state, grad_fn(params)

        params, points = as_tree(START), []
        state, stale = tx.init(params), jax.tree.map(jnp.zeros_like, params)
        for t in range(STEPS):
            v = as_tree(eigenvector(vector(params)))
            params, state, stale = step(params, state, stale, v, jnp.asarray(t, jnp.int32))
            points.append(vector(params))
    return points


def setup():
    """The page's functions, without its imports."""
    text = PAGE.read_text()
    return text[text.index(">>> def add") : text.index("| method", text.index(">>> def add"))]


def momentum(gradient_of, gradients=None):
    """SGD with momentum, driven by a method."""
    return family.train(START, gradients or numpy_gradients(), gradient_of, LR, MOMENTUM)


def noise():
    """The normal numbers that bSAM draws, as its start shows them."""
    found = []
    with x64():
        zeros = jax.tree.map(jnp.zeros_like, as_tree(START))
        method = sam_optax.bsam(data_size=1.0, weight_decay=0.0, decay=0.0, damping=1.0, key=0)
        state = method.init(zeros)
        for _ in range(STEPS):
            found.append(vector(method.start_fn(zeros, state)))
            _, state = method.update(zeros, state, zeros)
    return found


def example_losses(w):
    return 0.5 * np.sum(w**2) - EXAMPLES @ w**3 / 3


N = NUMBERS
RHO, ALPHA, LMBDA = N["rho"], N["alpha"], N["lmbda"]
GRADIENTS, LOSSES = numpy_gradients(), [numpy_loss(t) for t in range(STEPS)]
SECOND = lambda w: OTHER @ w - 1
AE_LOG, XSAM_LOG = [], []
PAPERS = {
    "SAM": lambda: momentum(family.sam(RHO)),
    "ASAM": lambda: momentum(paper.asam(RHO, N["eta"])),
    "F-SAM": lambda: momentum(paper.f_sam(RHO, N["sigma"], LMBDA)),
    "GSAM": lambda: momentum(family.gsam(RHO, ALPHA)),
    "LookSAM": lambda: momentum(family.looksam(RHO, N["k"], ALPHA)),
    "WSAM": lambda: family.wsam_decoupled(START, GRADIENTS, RHO, N["gamma"], LR, MOMENTUM),
    "Momentum-SAM": lambda: momentum(family.momentum_ascent(RHO, MOMENTUM, -1.0)),
    "LE-SAM": lambda: momentum(paper.le_sam(RHO, N["tau"])),
    "Stable SAM": lambda: momentum(paper.stable_sam(RHO)),
    "ZSharp": lambda: momentum(paper.zsharp(RHO, N["quantile"], layers)),
    "GC-SAM": lambda: momentum(paper.gc_sam(RHO, layers)),
    "AE-SAM": lambda: momentum(paper.ae_sam(RHO, c, N["delta"], AE_LOG)),
    "AdaSAM": lambda: paper.ada_sam(START, GRADIENTS, RHO, LR, 0.9, 0.999, 1e-8),
    "LightSAM": lambda: paper.light_sam(START, GRADIENTS, RHO, LR, N["v0"]),
    "SAMPa": lambda: paper.sampa(START, GRADIENTS, RHO, LMBDA, LR),
    "bSAM": lambda: paper.b_sam(
        START,
        GRADIENTS,
        noise(),
        rho=RHO,
        lr=LR,
        momentum=N["beta1"],
        decay=N["beta2"],
        weight_decay=N["wd"],
        damping=0.1,
        data_size=N["n"],
    ),
    "ESAM": lambda: momentum(
        paper.esam(RHO, 2, example_losses, lambda w: w - EXAMPLES * w**2), GRADIENTS
    ),
    "Lookbehind-SAM": lambda: paper.lookbehind(START, GRADIENTS, RHO, N["k"], LR, ALPHA),
    "AsyncSAM": lambda: momentum(paper.async_sam(RHO)),
    "SAM-Polyak": lambda: paper.sam_polyak(START, GRADIENTS, LOSSES, RHO, N["largest"]),
    "X-SAM": lambda: momentum(paper.x_sam(RHO, ALPHA, eigenvector)),
    "XSAM": lambda: momentum(
        paper.xsam(RHO, N["radius"], N["k"], np.linspace(0, 2, 21), LOSSES, XSAM_LOG)
    ),
    "GAM": lambda: momentum(paper.gam(RHO, ALPHA, hessian)),
    "Functional SAM": lambda: momentum(
        paper.functional_sam(RHO, jacobian, lambda w: np.tanh(LAYER @ w) - 0.3)
    ),
    "Focal-SAM": lambda: focal(),
    "M-SAM": lambda: modality(),
    "FGSAM": lambda: graph(),
}


def two_losses(ascent, sharp, plain):
    """A method of two losses, of which one changes from batch to batch."""
    of_step = [
        paper.of_two_losses(RHO, ascent(grad), sharp(grad), plain(grad)) for grad in GRADIENTS
    ]
    return momentum(lambda t, w, grad: of_step[t](t, w, grad))


def focal():
    plain = lambda grad: lambda w: grad(w) - LMBDA * SECOND(w)
    return two_losses(lambda grad: SECOND, lambda grad: lambda w: LMBDA * SECOND(w), plain)


def modality():
    return two_losses(lambda grad: SECOND, lambda grad: SECOND, lambda grad: grad)


def graph():
    plain = lambda grad: lambda w: LMBDA * SECOND(w)
    return two_losses(lambda grad: SECOND, lambda grad: grad, plain)


def test_every_row_is_compared():
    assert set(ROWS) == set(PAPERS)
    assert len(ROWS) == 27


@pytest.mark.parametrize("name", PAPERS)
def test_the_expression_is_the_papers_method(name):
    expected = PAPERS[name]()
    assert gap(trajectory(name), expected) < 1e-9
    # None of them is SAM, or a smaller gap would say little.
    assert name == "SAM" or gap(expected, PAPERS["SAM"]()) > 1e-4


def test_the_tests_of_adaptive_rules_have_both_outcomes():
    PAPERS["AE-SAM"]()
    assert {True, False} <= set(AE_LOG)
    PAPERS["XSAM"]()
    assert len(set(XSAM_LOG)) > 1
