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
