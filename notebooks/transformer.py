"""A transformer on text, in plain optax and Flax: AdamW, SAM, ASAM, SAM on a part of the network.

It predicts the next byte of the text of Python's ``help()``. It is trained on 20 kB of it, fifty
times over, and tested on another 60 kB: it learns the text by heart, as fine-tuning on little data
does. ``notebooks/text.py`` compares methods on text with seeds and intervals.
"""

from pydoc_data.topics import topics

import flax.linen as nn
import jax
import numpy as np
import optax

import sam_optax

LENGTH, BATCH, STEPS = 64, 16, 1000
text = np.frombuffer("\n".join(topics.values()).encode(), np.uint8).astype(np.int32)
train, test = text[:20_000], text[-60_000:]


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(
            nn.LayerNorm()(x), mask=mask
        )
        y = nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x))
        return x + nn.Dense(x.shape[-1])(nn.gelu(y))


class Transformer(nn.Module):
    width: int = 64

    @nn.compact
    def __call__(self, tokens):
        positions = self.param(
            "positions", nn.initializers.normal(0.02), (LENGTH, self.width)
        )
        x = nn.Embed(256, self.width, name="embed")(tokens) + positions
        for i in range(2):
            x = Block(name=f"block_{i}")(x, nn.make_causal_mask(tokens))
        return nn.Dense(256, name="head")(nn.LayerNorm()(x))


def examples(tokens, starts):
    return tokens[starts[:, None] + np.arange(LENGTH + 1)]


def loss_fn(params, batch):
    logits = Transformer().apply(params, batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def trained(tx):
    @jax.jit
    def step(params, state, batch):
        grad_fn = lambda p: jax.grad(loss_fn)(p, batch)
        updates, state = tx.update(grad_fn(params), state, params, grad_fn=grad_fn)
        return optax.apply_updates(params, updates), state

    params = jax.jit(Transformer().init)(jax.random.key(0), train[None, :LENGTH])
    state, rng = tx.init(params), np.random.default_rng(0)
    for _ in range(STEPS):
        batch = examples(train, rng.integers(len(train) - LENGTH, size=BATCH))
        params, state = step(params, state, batch)
    return params


def last_block(params):
    return jax.tree.map_with_path(
        lambda path, _: path[1].key in ("block_1", "head"), params
    )


adamw = optax.adamw(optax.cosine_decay_schedule(3e-3, STEPS), weight_decay=0.01)
some = sam_optax.perturb_only(sam_optax.sam(rho=0.1), last_block)
optimizers = {  # AdamW takes the grad_fn that it does not need, so that all share the step
    "AdamW": optax.with_extra_args_support(adamw),
    "SAM": sam_optax.sharpness_aware(adamw, sam_optax.sam(rho=0.1)),
    "ASAM": sam_optax.sharpness_aware(adamw, sam_optax.asam(rho=0.5)),
    "SAM on the last block": sam_optax.sharpness_aware(adamw, some),
}
for name, tx in optimizers.items():
    params = trained(tx)
    parts = [
        examples(part, np.arange(0, len(part) - LENGTH, LENGTH))
        for part in (train, test)
    ]
    losses = [jax.jit(loss_fn)(params, part) for part in parts]
    print("{:22} training {:.3f}  test {:.3f} nats per byte".format(name, *losses))
