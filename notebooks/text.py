"""Text: a transformer on bytes, which learns a text or to translate, by several methods.

    python notebooks/text.py                          the text of Python's help(), 64 bytes each
    python notebooks/text.py pairs.tsv --paper        lines source<TAB>target, as in ASAM's table 5

It needs pip install "sam_optax[experiments]", and sacrebleu for translations. With --paper the
settings are those of the ASAM paper's section 5.3 for IWSLT'14 DE-EN (Kwon et al. 2021): Adam, β
0.9 and 0.98, weight decay 0.0001, label smoothing 0.1, dropout 0.3, ρ 0.1 for SAM and 0.2 for
ASAM. Not printed and chosen here: epochs, batch size, warm-up and η. The paper's network has an
encoder and a decoder; here one stack of 12 layers reads the source and writes the target.
"""

import dataclasses
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

from sam_optax.experiments import Result, compare

SEPARATOR, END = 0xFE, 0xFF  # bytes that UTF-8 does not use
NO_LABEL = -1
PAPER = {
    "optimizer": "adam",
    "lr": 5e-4,
    "beta2": 0.98,
    "weight_decay": 1e-4,
    "epochs": 50,
}
PAPER |= {"batch_size": 128, "warmup_steps": 4000, "sam": {"rho": 0.1}}
PAPER |= {"asam": {"rho": 0.2, "eta": 0.01}}
SMALL = {"optimizer": "adam", "lr": 1e-3, "weight_decay": 0.0, "epochs": 10}


class Block(nn.Module):
    heads: int
    dropout: float

    @nn.compact
    def __call__(self, x, mask, train):
        drop = nn.Dropout(self.dropout, deterministic=not train)
        y = nn.LayerNorm()(x)
        x = x + drop(nn.MultiHeadDotProductAttention(self.heads)(y, y, mask=mask))
        y = nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x))
        return x + drop(nn.Dense(x.shape[-1])(nn.gelu(y)))


class Transformer(nn.Module):
    """Logits of the byte after each one; attention is causal, but sources see all of themselves."""

    width: int = 128
    depth: int = 2
    heads: int = 4
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x, train):
        source = jnp.cumsum(x[:, ::-1] == SEPARATOR, axis=1)[:, ::-1] > 0
        mask = nn.make_causal_mask(x, dtype=bool) | source[:, None, None]
        shape = (1, x.shape[1], self.width)
        positions = self.param("positions", nn.initializers.normal(0.02), shape)
        x = nn.Embed(256, self.width)(x) + positions
        for _ in range(self.depth):
            x = Block(self.heads, self.dropout)(x, mask, train)
        return nn.Dense(256)(nn.LayerNorm()(x))


def text(content: str, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Parts of a text, each labelled with the bytes after its own."""
    tokens = np.frombuffer(content.encode(), np.uint8).astype(np.int32)
    n = (len(tokens) - 1) // length
    x, y = (tokens[start : start + n * length].reshape(n, length) for start in (0, 1))
    return x, y


def pairs(content: str, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Source, separator and target of each line; only the target and its end are labels."""
    rows = [line.split("\t") for line in content.splitlines() if line.strip()]
    if wrong := [i for i, row in enumerate(rows, 1) if len(row) != 2]:
        raise SystemExit(
            f"line {wrong[0]} has {len(rows[wrong[0] - 1])} columns; use two."
        )
    found = [[*a.encode(), SEPARATOR, *b.encode(), END] for a, b in rows]
    kept = [tokens for tokens in found if len(tokens) <= length + 1]
    print(f"{len(found) - len(kept)} pairs of more than {length} bytes are left out.")
    x = np.full((len(kept), length), END, np.int32)
    y = np.full((len(kept), length), NO_LABEL, np.int32)
    for i, tokens in enumerate(kept):
        start = tokens.index(SEPARATOR)
        x[i, : len(tokens) - 1] = tokens[:-1]
        y[i, start : len(tokens) - 1] = tokens[start + 1 :]
    return x, y


def loss(smoothing: float):
    """Cross entropy of the labelled bytes of an example, in nats."""

    def cross_entropy(logits, y):
        labels = (1 - smoothing) * jax.nn.one_hot(y, 256) + smoothing / 256
        return jnp.mean(
            optax.softmax_cross_entropy(logits, labels), axis=1, where=y >= 0
        )

    return cross_entropy


def accuracy(logits, y):
    """Share of the labelled bytes that are predicted."""
    return jnp.mean(jnp.argmax(logits, -1) == y, axis=1, where=y >= 0)


def translations(network, params, x) -> list[str]:
    """The likeliest byte after the source, then after that one, and so on, up to the end."""
    rows, separator = jnp.arange(len(x)), jnp.argmax(x == SEPARATOR, axis=1)
    tokens = jnp.where(jnp.arange(x.shape[1]) <= separator[:, None], x, END)

    def next_byte(i, carry):
        tokens, place, ended = carry
        logits = network.apply(params, tokens, train=False)
        found = jnp.where(ended, END, jnp.argmax(logits[rows, place], -1))
        tokens = tokens.at[rows, place + 1].set(found, mode="drop")
        return tokens, place + 1, ended | (found == END)

    start = tokens, separator, separator < 0
    made = jax.jit(lambda: jax.lax.fori_loop(0, x.shape[1], next_byte, start)[0])()
    return [decoded(row) for row in np.asarray(made)]


def decoded(row) -> str:
    """What follows the separator, up to the end."""
    target = bytes(map(int, row)).partition(bytes([SEPARATOR]))[2]
    return target.partition(bytes([END]))[0].decode(errors="replace")


def bleu(found: Result, network, x, y) -> dict[str, float]:
    """Sacrebleu's BLEU of the greedy translations, by method, mean of the seeds."""
    import sacrebleu

    references = [decoded([SEPARATOR, *row[row >= 0]]) for row in y]

    def of(params):
        return sacrebleu.corpus_bleu(
            translations(network, params, x), [references]
        ).score

    return {
        m: float(np.mean([of(p) for p in seeds.values()]))
        for m, seeds in found.params.items()
    }


@dataclasses.dataclass
class Options:
    path: tyro.conf.Positional[Path | None] = None
    """A UTF-8 file of lines source<TAB>target; without one the text of Python's help()."""
    length: int = 64
    """Bytes of an example; of pairs at most, both texts together."""
    methods: tuple[str, ...] = ("sgd", "sam", "asam")
    epochs: int | None = None
    seeds: int = 3
    tune: bool = False
    paper: bool = False
    """The network and the settings of the ASAM paper."""
    out: Path | None = None


def main(options: Options) -> Result:
    if options.path is None:
        from pydoc_data.topics import topics

        x, y = text("\n".join(topics.values()), options.length)
    else:
        x, y = pairs(options.path.read_text(encoding="utf-8"), options.length)
    n = len(x) - max(1, len(x) // 10)  # the last tenth is the test set
    network = Transformer(512, 12, 8, 0.3) if options.paper else Transformer()
    settings = dict(PAPER if options.paper else SMALL)
    if options.epochs:
        settings["epochs"] = options.epochs
    found = compare(
        network,
        train=(x[:n], y[:n]),
        test=(x[n:], y[n:]),
        methods=options.methods,
        tune=options.tune,
        loss=loss(0.1 if options.paper else 0.0),
        metric=accuracy,
        higher_is_better=True,
        seeds=options.seeds,
        out=options.out,
        **{
            k: v
            for k, v in settings.items()
            if k not in ("sam", "asam") or k in options.methods
        },
    )
    found.print()
    if options.path is not None:
        print("BLEU:", bleu(found, network, x[n:], y[n:]))
    return found


if __name__ == "__main__":
    main(tyro.cli(Options))
