"""Networks of users, from a file, a package or a notebook: Flax Linen or NNX.

Both are used as Linen modules are: ``init(key, x, train=False)`` gives nested variables, with the
trained ones under ``"params"``, and ``apply(variables, x, train=..., rngs=..., mutable=...)`` the
outputs, and with ``mutable`` also the other variables after the call.
"""

import dataclasses
import inspect
from typing import Any

import flax.linen as nn
import jax
from flax import nnx

from sam_optax.experiments.errors import UserError
from sam_optax.experiments.named import line
from sam_optax.experiments.networks.from_nnx import Nnx
from sam_optax.experiments.types import PyTree

TRAIN = {"train": True, "training": True, "deterministic": False, "use_running_average": False}
"""Arguments of a Linen module's call that tell training from evaluation, with training's value."""
_FORMS = (
    "give a Flax Linen module, the class of a Linen or NNX module, or a function that returns one: "
    "of NNX with the parameter rngs; a parameter classes gets their number"
)


def adapted(given: Any, name: str, classes: int) -> Any:
    """A user's network with the interface of this module; ``name`` is for errors.

    Raises:
      UserError: it is neither a Linen nor an NNX module, or making it fails.
    """
    if isinstance(given, nnx.Module):
        raise UserError(
            f"--model {name}: is an NNX module, with one initialization for all seeds; give its "
            "class, or a function of rngs that returns it."
        )
    if isinstance(given, nn.Module):
        return _linen(given, name)
    if not callable(given):
        raise UserError(f"--model {name}: is of type {type(given).__name__}; {_FORMS}.")
    # NNX's classes have a call of their own, which hides the arguments.
    call: Any = given
    accepted = inspect.signature(call.__init__ if isinstance(given, type) else call).parameters
    known = {"classes": classes} if "classes" in accepted else {}

    def make(kind: type = nnx.Module, **options: Any) -> Any:
        try:
            made = given(**known, **options)
        except Exception as error:
            raise UserError(f"--model {name}: fails with {line(error)}; {_FORMS}.") from error
        if not isinstance(made, kind):
            raise UserError(f"--model {name}: returns the type {type(made).__name__}; {_FORMS}.")
        return made

    return Nnx(make) if "rngs" in accepted else _linen(make(nn.Module), name)


def _linen(module: nn.Module, name: str) -> Any:
    names = [n for n in inspect.signature(type(module).__call__).parameters if n in TRAIN]
    if len(names) > 1:
        raise UserError(
            f"--model {name}: {' and '.join(names)} of its call both tell training from "
            "evaluation; leave one."
        )
    return module if names == ["train"] else Linen(module, *names)


@dataclasses.dataclass(frozen=True)
class Linen:
    """A Linen module whose call tells training from evaluation by another argument, or by none."""

    module: nn.Module
    argument: str | None = None

    def init(self, key: jax.Array, x: jax.Array, *, train: bool) -> PyTree:
        """The variables."""
        return nn.meta.unbox(self.module.init(key, x, **self._mode(train)))

    def apply(self, variables: PyTree, x: jax.Array, *, train: bool, **options: Any) -> Any:
        """The outputs, and with ``mutable`` what has changed."""
        return self.module.apply(variables, x, **self._mode(train), **options)

    def _mode(self, train: bool) -> dict[str, Any]:
        return {} if self.argument is None else {self.argument: train == TRAIN[self.argument]}


def check(model: Any, name: str, example: jax.Array, outputs: tuple[int, ...] | None) -> None:
    """Raises :class:`UserError` if a user's network does not take the examples.

    ``outputs`` is the shape of the outputs of one example, if the loss needs one.
    """
    shape = "×".join(map(str, example.shape[1:])) or "no axes"

    def call() -> Any:
        variables = model.init(jax.random.key(0), example, train=False)
        rest = [k for k in variables if k != "params"]
        streams = {"dropout": jax.random.key(0)}
        trained = model.apply(variables, example, train=True, rngs=streams, mutable=rest)
        return variables.get("params"), trained[0], trained[1]

    try:
        params, found, _ = jax.eval_shape(call)
    except Exception as error:
        raise UserError(
            f"--model {name}: does not take examples of shape {shape} ({example.dtype}): "
            f"{line(error)}."
        ) from error
    if not jax.tree.leaves(params):
        raise UserError(f"--model {name}: has no params to train.")
    if not hasattr(found, "shape"):
        raise UserError(
            f"--model {name}: returns the type {type(found).__name__}; let it return an array."
        )
    if outputs is not None and found.shape[1:] != outputs:
        needed = "×".join(map(str, outputs))
        raise UserError(
            f"--model {name}: returns outputs of shape {found.shape[1:]} for an example, but the "
            f"data need {needed}, a logit for each class; let it return these, or give a loss."
        )
