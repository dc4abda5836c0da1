"""A loss over batches equals the loss over all examples at once."""

import jax
import jax.numpy as jnp
import pytest
from helpers import RuntimeCounted, assert_close
from nets import dataset, example_losses, examples, relu_net, tanh_losses

from sam_optax import analysis


@jax.jit
def full(params):
    return jnp.mean(tanh_losses(params, examples(23)))


@pytest.mark.parametrize("batch_size", [5, 40])
@pytest.mark.slow
def test_batches_of_any_size(batch_size):
    """Also with a short last batch, and with one batch only."""
    params, loss, vector = relu_net(), dataset(23, batch_size, tanh_losses), relu_net(1)
    assert_close(loss(params), full(params), rtol=1e-6)
    expected = jax.jit(jax.value_and_grad(full))(params)
    assert_close(loss.value_and_grad(params), expected, rtol=1e-5)
    product = jax.jit(lambda p, v: jax.jvp(jax.grad(full), (p,), (v,))[1])(params, vector)
    assert_close(loss.hvp(params, vector), product, rtol=1e-5)


@pytest.mark.slow
def test_scalar_losses_are_weighted_by_their_examples():
    """A mean of batch means would give the short batch too much weight."""
    params = relu_net()
    loss = dataset(23, losses=lambda p, batch: jnp.mean(tanh_losses(p, batch)))
    assert_close(loss(params), full(params), rtol=1e-6)
    values, weights = loss.each(lambda batch: batch(params))
    assert list(weights) == [5, 5, 5, 5, 3]
    assert abs(jnp.mean(values) - full(params)) > 1e-3


def test_filled_up_batches_with_weights():
    params, filled = relu_net(), jax.tree.map(lambda a: a.at[23:].set(0), examples(25))
    batches = jax.tree.map(lambda a: a.reshape(5, 5, *a.shape[1:]), filled)
    counted = (jnp.arange(25) < 23).reshape(5, 5)

    def masked(params, batch):
        data, mask = batch
        return jnp.sum(jnp.where(mask, tanh_losses(params, data), 0)) / jnp.sum(mask)

    loss = analysis.DatasetLoss(masked, (batches, counted), weights=counted.sum(1))
    expected = jnp.mean(tanh_losses(params, jax.tree.map(lambda a: a[:23], filled)))
    assert_close(loss(params), expected, rtol=1e-6)
    unweighted = analysis.DatasetLoss(masked, (batches, counted))
    assert abs(unweighted(params) - expected) > 1e-3
    with pytest.raises(ValueError, match="batches with explicit weights cannot be split"):
        loss.rebatch(3)


def test_each_batch_is_evaluated_once_and_traced_once():
    counted = RuntimeCounted(tanh_losses)
    loss = dataset(n=20, losses=counted)
    loss(relu_net())
    jax.effects_barrier()
    assert counted.evaluations == 4
    calls = counted.calls
    loss(relu_net(1))  # other params and the same shapes: no retrace
    assert counted.calls == calls


def test_low_precision_sums():
    """bfloat16 losses over many batches: a bfloat16 sum of them would stall."""
    loss = analysis.DatasetLoss(lambda w, x: (w + x).astype(jnp.bfloat16), jnp.ones((1000, 1)))
    assert float(loss(jnp.zeros((), jnp.bfloat16))) == 1


@pytest.mark.parametrize(
    ("batches", "options", "message"),
    [
        (None, {}, "no examples"),
        (jnp.ones((2, 3)), {"weights": jnp.ones(3)}, r"shape \(2,\).*\(3,\)"),
        ((jnp.ones((2, 3)), jnp.ones((3, 3))), {}, "equal leading axes"),
        (jnp.ones(3), {}, "pass weights"),
        (jnp.ones(()), {}, "leading axis"),
    ],
)
def test_errors(batches, options, message):
    with pytest.raises(ValueError, match=message):
        analysis.DatasetLoss(example_losses, batches, **options)


def test_losses_of_another_shape():
    with pytest.raises(ValueError, match="one loss for each example"):
        analysis.DatasetLoss(lambda w, x: x * w, jnp.ones((2, 3, 4)))(jnp.ones(()))
