"""The task, the methods with their recipes, and the random draws of each seed."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict

from sam_optax.experiments import named
from sam_optax.experiments.data.dataset import Dataset, load
from sam_optax.experiments.data.examples import corrupt
from sam_optax.experiments.methods import registry as methods
from sam_optax.experiments.methods.method import Base, Variant
from sam_optax.experiments.networks import builtin, own
from sam_optax.experiments.types import Json, PyTree, Record


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The training recipe of a method: the values of the options with the same names."""

    epochs: int
    batch_size: int
    m: int
    optimizer: str
    lr: float
    schedule: str
    warmup_steps: int
    momentum: float
    nesterov: bool
    weight_decay: float
    clip: float
    label_smoothing: float
    crop: int
    flip: bool
    cutout: int
    mixup: float
    beta2: float = 0.999

    @property
    def groups(self) -> int:
        """Number of equal parts of a batch, each with a separate perturbation."""
        return self.batch_size // self.m

    def base(self, examples: int) -> Base:
        """The base optimizer of so many examples; clipping acts on the gradient it receives."""
        steps = self.epochs * (examples // self.batch_size)
        rate: optax.Schedule = optax.constant_schedule(self.lr)
        if self.schedule == "cosine":
            rate = optax.cosine_decay_schedule(self.lr, max(1, steps - self.warmup_steps))
        if self.warmup_steps:
            rise = optax.linear_schedule(0.0, self.lr, self.warmup_steps)
            rate = optax.join_schedules([rise, rate], [self.warmup_steps])
        # The momentum of rmsprop is one of updates.
        keeps = self.optimizer != "rmsprop" and (self.optimizer != "sgd" or self.momentum)
        groups, decay = self.groups if self.groups > 1 else None, None if keeps else self.momentum
        return Base(self._optimizer, rate, groups, self.weight_decay, examples, decay)

    def _optimizer(self, rate: optax.Schedule) -> optax.GradientTransformation:
        betas = {"b1": self.momentum, "b2": self.beta2}
        momentum = {"momentum": self.momentum or None, "nesterov": self.nesterov}
        chosen = {
            "sgd": optax.sgd(rate, **momentum),
            "rmsprop": optax.rmsprop(rate, **momentum),
            "adam": optax.adam(rate, **betas),
            "adamw": optax.adamw(rate, **betas, weight_decay=self.weight_decay),
        }
        clip = [optax.clip_by_global_norm(self.clip)] if self.clip else []
        decay = [optax.add_decayed_weights(self.weight_decay)] * (self.optimizer != "adamw")
        return optax.chain(*clip, *decay, chosen[self.optimizer])


@dataclasses.dataclass(frozen=True)
class Entry:
    """A method of a run, with its hyperparameters and its recipe."""

    variant: Variant
    recipe: Recipe

    def at(self, values: Json) -> "Entry":
        """With other values of hyperparameters that scale the radius, or of settings.

        They may be traced.
        """
        own = {name: values[name] for name in self.variant.method.radius if name in values}
        settings = {name: value for name, value in values.items() if name not in own}
        variant = self.variant._replace(hyperparameters={**self.variant.hyperparameters, **own})
        return Entry(variant, dataclasses.replace(self.recipe, **settings))


PerExample: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array]
"""A loss or a score of each example, (n,), from outputs and labels."""


class Metric(NamedTuple):
    """A score of each test example and its name; without ``of`` the accuracy."""

    of: PerExample | None = None
    name: str = "accuracy"
    higher_is_better: bool = True

    @property
    def key(self) -> str:
        """Its name in the results."""
        return f"test_{self.name}"

    @property
    def record(self) -> Record:
        """What readers of the results need to know of it."""
        known = {"key": self.key, "name": self.name, "higher_is_better": self.higher_is_better}
        return {**known, "is_accuracy": self.of is None}


ACCURACY = Metric()


@dataclasses.dataclass(frozen=True)
class Task:
    """The task that all methods of a run share.

    Each seed has a separate initialization, label noise, order of examples and R-SAM noise, all
    shared by the methods. The labels of ``dataset`` are clean. If its test examples are
    ``held_out`` training examples, they are tested with labels as noisy as those trained on.
    ``initial`` are variables by path with which every seed starts. Without a ``loss`` it is cross
    entropy.
    """

    dataset: Dataset
    model: Any  # a Linen module, or what adapts a user's network to its interface
    seeds: tuple[int, ...]
    label_noise: float
    sharpness_rho: float
    entries: Mapping[str, Entry]
    held_out: bool = False
    initial: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    loss: PerExample | None = None
    metric: Metric = ACCURACY

    @property
    def example(self) -> jax.Array:
        """Zeros in the place of an example, as the network receives it."""
        return jnp.zeros((1, *self.dataset.shape), self.dataset.dtype)


def noisy_labels(task: Task, seeds: tuple[int, ...], held_out: bool = False) -> np.ndarray:
    """The labels that each seed trains on, or of the test examples, (seeds, examples)."""
    part, stream = (task.dataset.test, 2) if held_out else (task.dataset.train, 0)
    y, classes = part.y, task.dataset.classes
    if not task.label_noise or (held_out and not task.held_out):
        return np.stack([y] * len(seeds))
    rngs = [np.random.default_rng([seed, stream]) for seed in seeds]
    return np.stack([corrupt(y, task.label_noise, classes, rng) for rng in rngs])


INITIALIZATION, METHOD, EPOCHS = range(3)


def key(seed: chex.Numeric, purpose: chex.Numeric) -> jax.Array:
    """A seed's key for one of these purposes; the steps of epoch i (from 0) have EPOCHS + i."""
    return jax.random.fold_in(jax.random.key(seed), purpose)


def initial_variables(task: Task, seed: chex.Numeric) -> PyTree:
    """The variables of a seed's network before training."""
    return task.model.init(key(seed, INITIALIZATION), task.example, train=False)


def shapes(task: Task) -> dict[str, jax.ShapeDtypeStruct]:
    """The variables of a seed's network by path, without their values."""
    found = jax.eval_shape(functools.partial(initial_variables, task), 0)
    return flatten_dict(found, sep="/")


def load_dataset(settings: Json) -> Dataset:
    """All examples of the data set that settings (values by name) describe."""
    options = ("image_column", "label_column", "test_split", "image_size")
    return load(settings["dataset"], **{name: settings.get(name) for name in options})


def values(settings: Json) -> Record:
    """Settings as in the results, without their sources."""
    return {name: found["value"] for name, found in settings.items()}


OnEpoch: TypeAlias = Callable[[int, Json, Callable[[], PyTree]], object]
"""Called after an epoch of all methods: see ``compare``."""


class Given(NamedTuple):
    """What a call from Python may give as objects: network, data, loss, metric and callback."""

    model: Any = None
    dataset: Dataset | None = None
    loss: PerExample | None = None
    metric: Metric = ACCURACY
    on_epoch: OnEpoch | None = None


NOTHING = Given()


def entries_of(description: Json) -> dict[str, Entry]:
    """The methods that the description of a run defines, by name."""
    entries = {}
    for method in description["methods"]:
        own = {**values(description["settings"]), **values(method["settings"])}
        recipe = Recipe(**{name: own[name] for name in Recipe.__dataclass_fields__ if name in own})
        variant = Variant(methods.get(method["method"]), method["hyperparameters"])
        entries[method["name"]] = Entry(variant, recipe)
    return entries


def task_of(description: Json, dataset: Dataset, given: Given = NOTHING) -> Task:
    """The task that the description of a run defines, on the examples in use.

    Raises:
      UserError: the network is unknown, or does not suit the data.
    """
    settings = values(description["settings"])
    name, classes = settings["model"], dataset.classes
    network = given.model or (named.find(name) if named.is_spec(name) else None)
    if network is None:
        model = builtin.build(name, dataset.shape, classes)
    else:
        model, start = own.adapted(network, name, classes)
    task = Task(
        dataset=dataset,
        model=model,
        seeds=tuple(description["seeds"]),
        label_noise=settings["label_noise"],
        sharpness_rho=settings["sharpness_rho"],
        entries=entries_of(description),
        loss=given.loss,
        metric=given.metric,
    )
    if network is None:
        return task
    outputs = None if given.loss else (classes,)
    initial = own.check(model, name, task.example, outputs, start)
    return dataclasses.replace(task, initial=initial)
