"""What several test files share: comparing trees, counting evaluations, small models."""

import inspect
import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

# Of the lowest versions that are supported: what they lack.
needs_partition = pytest.mark.skipif(
    not hasattr(optax, "partition"), reason="optax.partition is newer than this optax"
)


def x64(enabled: bool = True) -> Any:
    """Context in which float64 is float64; the public name moved between versions of jax."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(enabled)
    from jax.experimental import enable_x64

    return enable_x64(enabled)


def precision(dtype: Any) -> Any:
    """Context in which arrays of ``dtype`` exist."""
    return x64(jnp.dtype(dtype).itemsize // (2 if jnp.dtype(dtype).kind == "c" else 1) == 8)


def to_numpy(leaf: Any) -> np.ndarray:
    """A leaf as float64 (or complex128), keys as their data."""
    if jnp.issubdtype(getattr(leaf, "dtype", np.float64), jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    if array.dtype == jax.dtypes.bfloat16:
        array = array.astype(np.float32)
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def leaves(tree: Any) -> list[np.ndarray]:
    """All leaves in float64, for the references."""
    return [to_numpy(leaf) for leaf in jax.tree.leaves(tree)]


def vector(tree: Any) -> np.ndarray:
    """All elements of all leaves in one vector."""
    return np.concatenate([np.zeros(0), *(leaf.ravel() for leaf in leaves(tree))])


def norm(tree: Any, p: float = 2) -> float:
    """‖·‖_p of the whole tree as one vector."""
    return float(np.linalg.norm(vector(tree), p))


def bits(leaf: Any) -> tuple[Any, ...]:
    """Everything about a leaf: shape, dtype, weak type, bytes."""
    if jnp.issubdtype(getattr(leaf, "dtype", np.float64), jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return array.shape, str(array.dtype), getattr(leaf, "weak_type", False), array.tobytes()


def assert_same(actual: Any, expected: Any) -> None:
    """Equal to the bit, dtypes, weak types and structure included."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    paths = jax.tree_util.tree_leaves_with_path(expected)
    for (path, want), got in zip(paths, jax.tree.leaves(actual), strict=True):
        name = jax.tree_util.keystr(path)
        assert bits(got) == bits(want), f"{name}: {got!r} is not {want!r}"


def same(actual: Any, expected: Any) -> bool:
    """Whether :func:`assert_same` holds."""
    try:
        assert_same(actual, expected)
    except AssertionError:
        return False
    return True


def assert_close(actual: Any, expected: Any, rtol: float, atol: float = 0.0) -> None:
    """Every leaf within ``atol`` + ``rtol`` × the largest magnitude of the expected leaf."""
    got, want = leaves(actual), leaves(expected)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        bound = atol + rtol * float(np.max(np.abs(b), initial=0))
        np.testing.assert_allclose(a, b, rtol=0, atol=bound)


def signature(tree: Any) -> Any:
    """Structure, shapes, dtypes and weak types: what must not change from step to step.

    Also of the abstract values that ``jax.eval_shape`` returns.
    """
    avals = [
        (tuple(x.shape), str(x.dtype), getattr(x, "weak_type", False))
        for x in jax.tree.leaves(tree)
    ]
    return jax.tree.structure(tree), avals


class Counted:
    """A function that counts how often Python calls it: evaluations eagerly, traces under jit."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.calls = 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return self.function(*args)


class RuntimeCounted(Counted):
    """A function that also counts how often the compiled program evaluates it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self.evaluations = 0

    def _count(self) -> None:
        self.evaluations += 1

    def __call__(self, *args: Any) -> Any:
        jax.debug.callback(self._count)
        return super().__call__(*args)


def init_mlp(seed: int = 0, sizes: tuple[int, ...] = (3, 4, 2), dtype: Any = jnp.float32) -> Any:
    """Kernels and biases (not zero) of a tanh network."""
    rng = np.random.default_rng(seed)
    return {
        f"layer{i}": {
            "kernel": jnp.asarray(rng.normal(size=(m, n)), dtype),
            "bias": jnp.asarray(0.1 * rng.normal(size=n), dtype),
        }
        for i, (m, n) in enumerate(itertools.pairwise(sizes))
    }


def mlp(params: Any, x: jax.Array) -> jax.Array:
    """The network's output."""
    for i in range(len(params)):
        x = x @ params[f"layer{i}"]["kernel"] + params[f"layer{i}"]["bias"]
        x = jnp.tanh(x) if i < len(params) - 1 else x
    return x


def batches(steps: int, seed: int = 1, size: int = 5, dtype: Any = jnp.float32) -> Any:
    """Inputs and targets for ``steps`` steps of the network above."""
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(steps, size, 3)), rng.normal(size=(steps, size, 2))
    return jnp.asarray(x, dtype), jnp.asarray(y, dtype)


def mlp_loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Mean squared error."""
    return jnp.mean(jnp.square(mlp(params, x) - y))


def sections(docstring):
    """The docstring's sections by heading (Google style)."""
    parts = re.split(r"^(\w+):$", inspect.cleandoc(docstring), flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


class Compilations:
    """Counts compilations while it is entered."""

    def __enter__(self):
        self.count = 0
        self.active = True
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def _listen(self, event, duration, **kwargs):
        self.count += self.active and "backend_compile" in event

    def __exit__(self, *error):
        self.active = False
