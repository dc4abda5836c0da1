"""``compare`` from Python: the command with a network, data, loss and metric as objects."""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.typing import ArrayLike

from sam_optax.experiments import comparison
from sam_optax.experiments.data.dataset import ARRAYS, from_arrays
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.methods.method import Method
from sam_optax.experiments.options import arguments
from sam_optax.experiments.options.declare import suggest
from sam_optax.experiments.options.options import Compare
from sam_optax.experiments.reporting.table import Result
from sam_optax.experiments.training.task import ACCURACY, Given, Metric, OnEpoch, PerExample
from sam_optax.experiments.types import Json, Record


def compare(
    model: Any = None,
    *,
    train: tuple[ArrayLike, ArrayLike] | None = None,
    test: tuple[ArrayLike, ArrayLike] | None = None,
    methods: Sequence[str | Method] | None = None,
    tune: bool = False,
    loss: PerExample | None = None,
    metric: PerExample | None = None,
    higher_is_better: bool | None = None,
    on_epoch: OnEpoch | None = None,
    **options: Any,
) -> Result:
    """Trains a network by several methods and compares them: ``python -m sam_optax compare``.

    Args:
      model: the name of a built-in network, ``FILE.py:NAME``, a Flax Linen module, the class of a
        Linen or NNX module, or a function that returns one; one of NNX takes ``rngs``, and a
        parameter ``classes`` gets their number. A Linen module may take ``train``, ``training``,
        ``deterministic`` or ``use_running_average`` in its call. Or a pair of one of these objects
        and the variables that every seed starts from, such as ``open_run(DIR).networks[0].load()``;
        what they lack is initialized. Default: the command's, an MLP.
      train: training examples ``(x, y)``: x of any shape (n, …), y the integer labels (n,), or with
        a ``loss`` anything it takes. Default: the command's data, digits, or ``dataset=``.
      test: test examples ``(x, y)``. Default: a fifth of the training examples is held out.
      methods: names of methods, such as ``["sgd", "sam"]``; one of yours is ``FILE.py:NAME``, or
        what ``@method`` of this package makes of a function at the top of a module or notebook.
        Default: the command's.
      tune: whether radius and weight decay of every method are chosen on held-out examples first.
      loss: ``(outputs, y) -> (n,)``, the loss of each example. Default: cross entropy.
      metric: ``(outputs, y) -> (n,)``, a score of each test example, averaged over them. Default:
        the accuracy, or the loss if one is given.
      higher_is_better: whether a higher ``metric`` is better; required with one.
      on_epoch: ``(epoch, scores, params)``, called after each epoch, but not of the trials of
        ``tune``: ``scores[method]`` has a list over the seeds for each curve, as ``"train_loss"``;
        ``params()`` gives the variables, ``[method][seed]``. Methods that have ended are missing.
      **options: any option of the command by its name, such as ``epochs=20, seeds=3, lr=0.1,
        out="runs/first"``, and hyperparameters by method: ``sam={"rho": [0.1, 0.2]}``. With
        ``resume=True`` pass the same network and loss: they cannot be told from others.

    Returns:
      The :class:`Result`.

    Raises:
      UserError: an argument is invalid, or the network does not suit the data.
    """
    if higher_is_better not in ([None] if metric is None else [True, False]):
        raise UserError("higher_is_better: give True or False with a metric, and only with one.")
    if isinstance(methods, str | Method):
        raise UserError('methods: give a list of them, such as ["sgd", "sam"].')
    functions = [getattr(of, "build", of) for of in methods or ()]
    names = [f"{of.__module__}:{of.__name__}" if callable(of) else str(of) for of in functions]
    settings, dataset, scored = {**_options(options, names), "tune": tune}, None, ACCURACY
    if methods is not None:
        settings["methods"] = tuple(names)
    if isinstance(model, str):
        settings["model"], model = model, None
    elif model is not None:
        network = model[0] if isinstance(model, tuple) and model else model
        settings["model"] = getattr(network, "__name__", type(network).__name__)
    if train is not None:
        if "dataset" in settings:
            raise UserError("dataset: train is given, too; leave one out.")
        dataset = from_arrays(train=train, test=test, classification=loss is None)
        settings["dataset"] = ARRAYS
    elif test is not None:
        raise UserError("test: give train, too.")
    if metric is not None:
        name = getattr(metric, "__name__", "metric")
        scored = Metric(metric, name if name.isidentifier() else "metric", bool(higher_is_better))
    elif loss is not None:
        scored = Metric(loss, "loss", False)
    given = Given(model, dataset, loss, scored, on_epoch)
    found = comparison.run(Compare(**settings), given, show=False)
    if found is None:
        raise UserError("dry_run: nothing is trained; leave it out.")
    return found


def _options(options: Json, methods: Sequence[str]) -> Record:
    """The fields of :class:`Compare` from arguments."""
    found, known = dict[str, Any](), arguments.known(Compare, methods)
    trained = {"sgd", *(name.partition(".")[0] for name in known if "." in name)}
    for name in trained & inspect.signature(compare).parameters.keys():
        raise UserError(f"methods: {name} is named as an argument of compare; rename its function.")
    for name, value in options.items():
        if name in trained and isinstance(value, Mapping):
            for option, x in value.items():
                several = _plain(x)
                found[f"{name}.{option}"] = several if isinstance(several, tuple) else (several,)
        elif name in trained and name not in known:
            raise UserError(f'{name}: got {value!r}; give a dict, such as {name}={{"rho": 0.1}}.')
        else:
            found[name] = Path(value) if name == "out" and value else _plain(value)
    for name in (name for name in found if name not in known):
        hint = suggest(name, known, "see python -m sam_optax compare -h.")
        raise UserError(f"{name}: unknown option; {hint}")
    return arguments.collected(found)


def _plain(value: Any) -> Any:
    """A value, or several in a tuple, with Python's numbers in the place of NumPy's and JAX's."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return tuple(map(_plain, value)) if isinstance(value, list | tuple | range) else value
