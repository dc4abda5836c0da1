"""Small trainings, for the tests of the papers' experiments."""

import jax
import jax.numpy as jnp

from sam_optax.experiments.papers import (
    architectures,
    datasets,
    devices,
    optimizer,
    plan,
    settings,
    step,
)
from sam_optax.experiments.papers.loop import Training
from sam_optax.experiments.papers.metrics import Metrics
from sam_optax.experiments.papers.options import Hyperparameters, Train


class Silent:
    """Progress that nobody wants to see."""

    def steps(self, *_):
        pass

    def epoch(self, *_):
        pass


def prepare(
    images, count=1, dtype=jnp.float32, rho=0.05, hyperparameters=None, trace=False, **options
):
    """Everything that a training needs, in the order of its making."""
    options = {"batch_size": 16, "epochs": 2, "model": "flat", **options}
    hyperparameters = Hyperparameters(**{"rho": rho, **(hyperparameters or {})})
    given = Train(dataset=f"tfds:{images}", hyperparameters=hyperparameters, **options)
    chosen = settings.resolve(given)
    dataset = datasets.load(chosen["dataset"], 32)
    place = devices.choose(count)
    extent = plan.make(chosen, dataset, 1.0, 0, count)
    model = architectures.build(chosen["model"], dataset.classes, dataset.size, dtype)
    problem = step.Problem(model, chosen, dataset)
    tx = optimizer.make(chosen, extent, jax.random.key(1))
    make = step.init(problem, tx, 0, dataset.size)
    state = jax.eval_shape(make) if trace else jax.jit(make, out_shardings=place.whole)()
    return problem, extent, place, state


def train(*args, **kwargs):
    problem, extent, place, state = prepare(*args, **kwargs)
    training, metrics = Training(problem, extent, place, state), Metrics(None, False)
    training.run(0, metrics, Silent(), lambda epoch: None)
    return training, metrics.points
