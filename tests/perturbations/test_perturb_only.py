"""``perturb_only``: the chosen leaves' displacement is the inner method's on them alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, assert_same, norm, signature
from methods import often

import sam_optax

KEY = jax.random.key(0)
INNER = {
    "asam": sam_optax.asam(0.3, normalization="filterwise"),
    "fsam": sam_optax.fsam(0.3),
    "rsam": sam_optax.rsam(0.3, key=KEY),
    "by_hand": optax.chain(optax.scale_by_schedule(lambda t: t + 1.0), optax.scale(0.1)),
}
every_inner = pytest.mark.parametrize("name", often(INNER, "asam", "rsam"))


def tree(seed):
    rng = np.random.default_rng(seed)
    shapes = {"norm": {"bias": (3,), "scale": (3,)}, "conv": (2, 1, 3), "head": (3, 2)}
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


MASK = {"norm": True, "conv": False, "head": True}


def part(params):
    """The chosen leaves alone."""
    return {key: value for key, value in params.items() if MASK[key]}


@every_inner
def test_is_the_inner_method_on_the_chosen_leaves(name):
    inner = sam_optax.as_perturbation(INNER[name])
    method = sam_optax.perturb_only(INNER[name], MASK)
    assert method.has_start == inner.has_start
    params, grads = tree(0), tree(1)
    state, inner_state = method.init(params), inner.init(part(params))
    for _ in range(2):
        start = method.start_fn(params, state)
        assert_same(part(start), inner.start_fn(part(params), inner_state))
        assert_same(start["conv"], params["conv"])
        point, _ = method.perturb_fn(params, grads, state)
        expected_point, _ = inner.perturb_fn(part(params), part(grads), inner_state)
        assert_close(part(point), expected_point, 1e-6)
        assert_same(point["conv"], params["conv"])
        eps, state = method.update(grads, state, params)
        expected, inner_state = inner.update(part(grads), inner_state, part(params))
        assert_close(part(eps), expected, 1e-6)
        assert_same(eps["conv"], jnp.zeros_like(params["conv"]))
        assert len(jax.tree.leaves(state)) == len(jax.tree.leaves(inner_state))


@every_inner
def test_all_or_nothing_chosen(name):
    params, grads = tree(0), tree(1)
    inner, everything, nothing = (
        sam_optax.as_perturbation(INNER[name]),
        *(sam_optax.perturb_only(INNER[name], chosen) for chosen in (True, False)),
    )
    eps, _ = everything.update(grads, everything.init(params), params)
    assert_same(eps, inner.update(grads, inner.init(params), params)[0])
    assert norm(nothing.update(grads, nothing.init(params), params)[0]) == 0


@pytest.mark.parametrize("chosen", ["a", "b"])
def test_the_norm_is_over_the_perturbed_leaves(chosen):
    grads, params = (
        {"a": jnp.array([x]), "b": jnp.array([y])} for x, y in ((3.0, 4.0), (1.0, -0.0))
    )
    method = sam_optax.perturb_only(sam_optax.sam(0.1), {k: k == chosen for k in params})
    point, _ = method.perturb_fn(params, grads, method.init(params))
    moved = {k: float(point[k][0] - params[k][0]) for k in params}
    assert moved == pytest.approx({k: 0.1 * (k == chosen) for k in params}, rel=1e-5)


def test_grad_fn_sees_and_differentiates_the_whole_tree():
    method = sam_optax.perturb_only(INNER["rsam"], MASK)
    tx = sam_optax.sharpness_aware(optax.sgd(1.0), method)
    params = tree(0)
    seen = []

    def grad_fn(p):
        seen.append(signature(p))
        return jax.tree.map(lambda x: 2 * x, p)

    updates, _ = tx.update(None, tx.init(params), params, grad_fn=grad_fn)
    assert set(map(str, seen)) == {str(signature(params))}
    assert_same(updates["conv"], -2 * params["conv"])  # the gradient at its unperturbed values


@pytest.mark.parametrize(
    "mask", [{"norm": True}, {"norm": True, "conv": 1, "head": False}, "norm", None, [True]]
)
def test_bad_masks(mask):
    method = sam_optax.perturb_only(sam_optax.sam(), mask)
    with pytest.raises(ValueError, match="mask must be a pytree of booleans"):
        method.init(tree(0))
