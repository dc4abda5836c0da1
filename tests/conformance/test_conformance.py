"""What every method keeps: a method joins by a line in ``tests/methods.py`` and runs this file.

python -m pytest -m "" tests/conformance/test_conformance.py -k NAME
"""

import copy
import functools
import inspect
import pickle
import re

import flax.serialization
import jax
import jax.numpy as jnp
import methods
import numpy as np
import optax
import pytest
from helpers import Counted, assert_close, assert_same, norm, precision, signature, vector, x64
from methods import ASCEND_AT_ZERO, NAMES, OF_OPTAX, WIDEN, make, often, subject
from trees import TREES

import sam_optax

PARAMS = {
    "conv": jnp.array([[[1.0, -2.0]]]),
    "dense": {"bias": jnp.array([0.5, -1.0]), "kernel": jnp.array([[1.0, 0.2], [-0.3, 2.0]])},
}
SHAPES = jax.eval_shape(lambda: PARAMS)
DTYPES = [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64, jnp.complex64, jnp.complex128]
every_method = pytest.mark.parametrize("name", often())
our_methods = pytest.mark.parametrize("name", often([n for n in NAMES if n not in OF_OPTAX]))
# A method alone, and inside ``sharpness_aware`` with a base optimizer.
in_both_places = pytest.mark.parametrize("base", [None, "sgd"])


def gradient(params):
    return jax.tree.map(lambda x: x + 0.1 * x * jnp.abs(x) ** 2, params)


def step(tx, params, state):
    """One step: the params, moved by what the transformation returns, and the state."""
    updates, state = tx.update(gradient(params), state, params, grad_fn=gradient)
    return optax.apply_updates(params, updates), state


@functools.cache
def reference(name, base):
    """Params and state after one step, and after three, outside of jit."""
    tx, points = subject(name, base), [(PARAMS, subject(name, base).init(PARAMS))]
    for _ in range(3):
        points.append(step(tx, *points[-1]))
    return points[1], points[3]


def of_dtype(dtype):
    """As PARAMS, in a dtype."""
    return jax.tree.map(lambda x: x.astype(dtype), PARAMS)


def check_kept(method, params, grads, wide=False):
    """Shapes, dtypes and weak types of ε, w + ε, the start and the state.

    By tracing alone, which is where they are decided.
    """
    state = method.init(params)

    def everything(params, grads, state):
        eps, new_state = method.update(grads, state, params)
        point, _ = method.perturb_fn(params, grads, state)
        return eps, point, method.start_fn(params, state), new_state

    eps, point, start, new_state = jax.eval_shape(everything, params, grads, state)
    if wide:  # ε of a float16 gradient is float32
        widen = lambda g: g.astype(jnp.float32) if g.dtype == jnp.float16 else g
        grads = jax.tree.map(widen, grads)
    assert signature(eps) == signature(grads)
    assert signature(point) == signature(start) == signature(params)
    assert signature(new_state) == signature(state)


# A converter, a measure, and a piece that is not a method without the full gradient.
OTHERS = {"as_perturbation", "perturbation_survival", "project_out"}


def test_every_perturbation_of_the_library_is_in_the_table():
    public = {name: getattr(sam_optax, name) for name in sam_optax.__all__}
    functions = {name: f for name, f in public.items() if inspect.isfunction(f)}
    returns = {name: str(inspect.signature(f).return_annotation) for name, f in functions.items()}
    names = {name for name, kind in returns.items() if "Perturbation" in kind} - OTHERS
    table = inspect.getsource(methods)
    assert names <= {*re.findall(r"\bsam_optax\.(\w+)", table)}


@every_method
@in_both_places
def test_protocol(name, base):
    tx = subject(name, base)
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    assert base or isinstance(tx, sam_optax.Perturbation)
    init, update = tx
    assert list(inspect.signature(init).parameters) == ["params"]
    parameters = inspect.signature(update).parameters
    assert list(parameters)[:3] == ["updates", "state", "params"]
    assert parameters["params"].default is None
    assert any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


@every_method
@in_both_places
def test_init_and_update_are_pure_and_tolerate_extra_arguments(name, base):
    tx = subject(name, base)
    state, grads = tx.init(PARAMS), gradient(PARAMS)
    before = jax.tree.map(jnp.copy, (PARAMS, state, grads))
    update = functools.partial(tx.update, grads, state, PARAMS, grad_fn=gradient)
    first = update()
    assert_same(update(value=jnp.asarray(1.0), unknown="text", function=abs), first)
    assert_same((PARAMS, state, grads), before)
    assert_same(tx.init(PARAMS), state)


@every_method
@in_both_places
def test_jit_without_a_retrace_and_with_donation(name, base):
    """Params and state are donated from the first step on: no state aliases params."""
    tx = subject(name, base)
    counted = Counted(functools.partial(step, tx))
    jitted = jax.jit(counted, donate_argnums=(0, 1))
    params = jax.tree.map(jnp.copy, PARAMS)
    state = tx.init(params)
    expected = signature((params, state))
    for _ in range(3):
        donated = params
        params, state = jitted(params, state)
        assert all(x.is_deleted() for x in jax.tree.leaves(donated))
        assert signature((params, state)) == expected
    assert_close((params, state), reference(name, base)[1], 1e-5)
    assert counted.calls == 1


@our_methods
@in_both_places
def test_zero_gradient(name, base):
    tx, zeros = subject(name, base), jax.tree.map(jnp.zeros_like, PARAMS)
    state = tx.init(PARAMS)
    for _ in range(2):
        # Nor is there a NaN on the way, which would stop a user who is looking for one.
        with jax.debug_nans(True):
            updates, state = tx.update(zeros, state, PARAMS, grad_fn=lambda p: zeros)
        assert np.all(np.isfinite(vector((updates, state))))
        ascends = base is None and (name in ASCEND_AT_ZERO or make(name).has_start)
        assert ascends or norm(updates) == 0


@every_method
@in_both_places
def test_the_state_is_plain_data(name, base):
    """It goes through what copies, maps and stores pytrees, and training goes on to the bit.

    Case 27.
    """
    tx, (saved, later) = subject(name, base), reference(name, base)
    target = PARAMS, tx.init(PARAMS)
    assert signature(jax.eval_shape(tx.init, SHAPES)) == signature(tx.init(SHAPES))
    assert signature(tx.init(SHAPES)) == signature(target[1])
    leaves, structure = jax.tree.flatten(saved)
    arrays = [np.array(leaf) for leaf in leaves]
    assert all(array.dtype.kind in "fiub" for array in arrays)  # what any serializer knows
    assert_same(copy.deepcopy(saved), saved)
    for restored in (
        pickle.loads(pickle.dumps(saved)),
        flax.serialization.from_bytes(target, flax.serialization.to_bytes(saved)),
        jax.tree.unflatten(structure, arrays),
    ):
        restored = jax.tree.map(jnp.asarray, restored)
        assert_same(restored, saved)
    assert_close(step(tx, *step(tx, *restored)), later, rtol=0)


@every_method
@in_both_places
def test_tree_map_params(name, base):
    """What has the form of the params is mapped; counts, keys and radii are not."""
    tx = subject(name, base)
    state = tx.init(PARAMS)
    mapped, others = [], []

    def with_params(leaf, p):
        if not isinstance(leaf, optax.MaskedNode):
            mapped.append((leaf.shape, p.shape))
        return leaf

    optax.tree_utils.tree_map_params(
        tx,
        with_params,
        state,
        PARAMS,
        transform_non_params=lambda leaf: others.append(leaf.shape),
        is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode),  # as for optax.masked
    )
    assert all(shape == of_param for shape, of_param in mapped)
    assert PARAMS["dense"]["kernel"].shape not in others
    assert len(mapped) + len(others) == len(jax.tree.leaves(state))
    assert_same(optax.tree_utils.tree_map_params(tx, lambda leaf: leaf, state), state)


@our_methods
def test_dtypes(name):
    """Of every kind, mixed, weak, and of gradients that differ; without implicit promotion, too."""
    for dtype in DTYPES:
        with precision(dtype), jax.numpy_dtype_promotion("strict"):
            wide = name in WIDEN and dtype == jnp.float16
            check_kept(make(name), of_dtype(dtype), of_dtype(dtype), wide)
    with x64():
        mixed = {str(dtype): jnp.ones(2, dtype) for dtype in (*DTYPES, jnp.int32)}
        check_kept(make(name), mixed, mixed, name in WIDEN)
    weak = {"kernel": jnp.asarray(1.0), "bias": jnp.full((), 2.0)}  # of Python's numbers
    check_kept(make(name), weak, gradient(weak))
    low, wide = of_dtype(jnp.bfloat16), of_dtype(jnp.float32)
    for params, grads in ((low, wide), (wide, low), (of_dtype(jnp.float16), low)):
        check_kept(make(name), params, grads)


@every_method
def test_updates_have_the_dtypes_of_the_params(name):
    """Those of a base optimizer, for gradients wider or narrower than the params, twice."""
    tx = subject(name, "sgd")
    params = {"bias": jnp.ones(2, jnp.bfloat16), "kernel": jnp.ones((2, 2), jnp.float32)}

    def crossed(p):
        return {"bias": p["bias"].astype(jnp.float32), "kernel": p["kernel"].astype(jnp.bfloat16)}

    def one(params, state):
        updates, state = tx.update(crossed(params), state, params, grad_fn=crossed)
        return optax.apply_updates(params, updates), state

    first = jax.eval_shape(one, params, tx.init(params))
    assert signature(jax.eval_shape(one, *first)) == signature(first)
    assert signature(first[0]) == signature(params)


# A list has no names, so that asam warns that it has found no biases.
@pytest.mark.filterwarnings("ignore:asam found no biases")
@our_methods
def test_trees(name):
    """Of every kind; the values of the empty ones and of integers, too."""
    for tree in TREES.values():
        check_kept(make(name), tree(), tree())
    params = {"a": jnp.zeros((0, 2)), "n": jnp.array([1, 2]), "none": None, "empty": {}}
    with jax.disable_jit():  # op by op, to compile less
        eps, state = make(name).update(params, make(name).init(params), params)
        point, _ = make(name).perturb_fn(params, params, make(name).init(params))
    assert jax.tree.structure(eps) == jax.tree.structure(params)
    assert np.all(np.isfinite(vector((eps, state))))
    assert_same(point, params)


@our_methods
def test_gradients_with_holes(name):
    """Integer leaves whose gradient is float0 or absent; frozen ones without any."""
    weights = {"kernel": jnp.array([[1.0, -2.0]]), "bias": jnp.array([0.5])}
    params = {"n": jnp.array([1, 2]), "frozen": {"a": jnp.ones(2)}, "w": weights}
    method = make(name)
    for n in (np.zeros(2, jax.dtypes.float0), None):
        grads = {"n": n, "frozen": None, "w": gradient(weights)}
        state = method.init(params)
        with jax.disable_jit():
            eps, new_state = method.update(grads, state, params)
            point, _ = method.perturb_fn(params, grads, state)
        assert eps["frozen"] is None
        assert signature(new_state) == signature(state)
        assert_same((point["frozen"], point["n"]), (params["frozen"], params["n"]))
        assert np.all(np.isfinite(vector(point)))
