"""The methods of the experiments, by name; a new one is a function in one of the files below.

Its parameters after the base optimizer are the hyperparameters, with their defaults.
These were chosen on digits with 40 % wrong training labels by ``compare --tune``.
"""

# They register themselves, in the order in which they are listed.
from sam_optax.experiments.methods import family, cheap, catalogue  # noqa: F401, I001
from sam_optax.experiments.methods.method import METHODS as METHODS

DEFAULT = ("sgd", "sam", "asam", "rsam", "fsam")
