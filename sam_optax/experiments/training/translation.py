"""BLEU of the translations of a network that is trained on pairs."""

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from sam_optax.experiments.data.text import END, SEPARATOR, decoded
from sam_optax.experiments.training import measures
from sam_optax.experiments.training.task import Task
from sam_optax.experiments.types import PyTree

State: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]


def bleu(task: Task, variables: PyTree) -> np.ndarray:
    """Sacrebleu's BLEU / 100 on the test pairs; variables have an axis of seeds in front."""
    import sacrebleu  # an extra

    x, y = task.dataset.test
    index, weight = measures.in_blocks(len(x))
    program = jax.jit(lambda variables, x: translations(task, variables, x))
    references = [decoded(labels[labels >= 0]) for labels in y]
    found = []
    for i in range(len(task.seeds)):
        one = jax.tree.map(lambda leaf, i=i: leaf[i], variables)
        blocks = np.concatenate([program(one, x[block]) for block in index])
        texts = [
            decoded(row[np.argmax(row == SEPARATOR) + 1 :]) for row in blocks[weight.ravel() > 0]
        ]
        found.append(sacrebleu.corpus_bleu(texts, [references]).score / 100)
    return np.array(found)


def translations(task: Task, variables: PyTree, x: jax.Array) -> jax.Array:
    """The likeliest byte after the source, then after that one, and so on, in the place of targets.

    They end with ``END``, or where the longest example does.
    """
    rows, separator = jnp.arange(len(x)), jnp.argmax(x == SEPARATOR, axis=1)
    sources = jnp.where(jnp.arange(x.shape[1]) <= separator[:, None], x, END)

    def going(state: State) -> jax.Array:
        _, place, ended = state
        return ~jnp.all(ended | (place + 1 >= x.shape[1]))

    def next_byte(state: State) -> State:
        tokens, place, ended = state
        logits: Any = task.model.apply(variables, tokens, train=False)
        found = jnp.where(ended, END, jnp.argmax(logits[rows, place], -1))
        tokens = tokens.at[rows, place + 1].set(found, mode="drop")
        return tokens, place + 1, ended | (found == END)

    return jax.lax.while_loop(going, next_byte, (sources, separator, separator < 0))[0]
