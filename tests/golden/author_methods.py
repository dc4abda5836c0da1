"""The methods of ``test_authors.py``: the expression of this library for each published code."""

import functools
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.tree_utils as otu
from jax.flatten_util import ravel_pytree

from sam_optax import (
    after,
    asam,
    decoupled_sharpness,
    every,
    fisher_sam,
    fsam,
    lookbehind,
    low_pass,
    match_ascent_norm,
    mix_gradients,
    momentum_start,
    perturb_only,
    random_mask,
    remove_full_gradient,
    reuse_orthogonal,
    rho_from_learning_rate,
    rising_samples,
    sam,
    sharpness_aware,
    simultaneous,
    smooth_gradient,
    sparsify,
    surrogate_gap,
    toward_maximum,
    zscore_filter,
)

AUTHORS = Path(__file__).parent / "authors"
STEPS = 8


# ---- The problem and the recorded runs


def template(normalized):
    shapes = {"fc1": {"bias": 7, "kernel": (5, 7)}, "fc2": {"bias": 3, "kernel": (7, 3)}}
    shapes |= {"norm": {"bias": 7, "scale": 7}} if normalized else {}
    return jax.tree.map(np.zeros, shapes, is_leaf=lambda shape: not isinstance(shape, dict))


def unflatten(vector):
    return ravel_pytree(template(vector.shape[-1] > 66))[1](vector)


def network(p, x):
    h = x @ p["fc1"]["kernel"] + p["fc1"]["bias"]
    if "norm" in p:
        h = jax.nn.standardize(h, epsilon=1e-5) * p["norm"]["scale"] + p["norm"]["bias"]
    return jnp.tanh(h) @ p["fc2"]["kernel"] + p["fc2"]["bias"]


def losses_fn(p, batch):
    x, y = batch
    return optax.softmax_cross_entropy_with_integer_labels(network(p, x), y)


class Batch:
    """One step's batch, and the functions that a training loop makes of it."""

    def __init__(self, x, y, i):
        self.examples, self.i = (x[i], y[i].astype(jnp.int32)), i
        self.grad = jax.grad(self.loss)
        self.before = lambda: Batch(x, y, jnp.maximum(i - 1, 0))

    def loss(self, p):
        return losses_fn(p, self.examples).mean()

    def part(self, i, parts):
        """The gradient on one of several contiguous parts."""
        x, y = (a.reshape(parts, -1, *a.shape[1:])[i] for a in self.examples)
        return jax.grad(lambda p: losses_fn(p, (x, y)).mean())

    def weighted(self, weights):
        """The gradient of Σ wᵢ ℓᵢ / n, with a weight for each class."""
        return jax.grad(lambda p: (weights[self.examples[1]] * losses_fn(p, self.examples)).mean())

    def at(self, recorded):
        """The recorded array of this step."""
        return jnp.asarray(recorded)[self.i]


def parsed(value):
    try:
        return float(value)
    except ValueError:
        return {"True": True, "False": False}.get(value, value)


@functools.cache
def file(name):
    with np.load(AUTHORS / f"{name}.npz") as arrays:
        return dict(arrays)


def read(method, run):
    """Hyperparameters and recorded arrays, the params after each step, and the problem."""
    arrays = file(method)
    (index,) = np.flatnonzero(arrays["names"] == run)
    pairs = (line.split("=", 1) for line in str(arrays["hyper"][index]).splitlines())
    hyper = {name.removeprefix("base_"): parsed(value) for name, value in pairs}
    own = {key.split("/")[-1]: a for key, a in arrays.items() if key.startswith(f"{run}/")}
    problem = file(f"problem_{int(hyper['problem'])}")
    return SimpleNamespace(**{**arrays, **hyper, **own}), arrays["params"][index], problem


def torch_base(h, **changed):
    """``torch.optim``'s, with weight decay in the gradient for SGD."""
    h = SimpleNamespace(**{**vars(h), **changed})
    if h.base == "adamw":
        return optax.adamw(h.lr, weight_decay=h.weight_decay)
    sgd = optax.sgd(h.lr, getattr(h, "momentum", None), getattr(h, "nesterov", False))
    return optax.chain(optax.add_decayed_weights(getattr(h, "weight_decay", 0.0)), sgd)


# ---- The expressions: (hyperparameters, base optimizer) -> optimizer, or that and the arguments of
# its update, a function of the batch and the params. Without these, ``grad_fn`` is the only one.


def add(a, b, factor=1.0):
    return jax.tree.map(lambda x, y: x + factor * y, a, b)


def scaled(tree, factor):
    return jax.tree.map(lambda x: factor * x, tree)


def norm(tree):
    return jnp.linalg.norm(ravel_pytree(tree)[0])


def each(function):
    """A transformation of each leaf and its weights."""
    return optax.stateless(lambda g, w: jax.tree.map(function, g, w))


def stateless(update):
    """A transformation that receives the arguments of a perturbation or of a descent."""
    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


LEAVES = {"fc1": {"bias": "a", "kernel": "b"}, "fc2": {"bias": "c", "kernel": "d"}}

every_leaf = functools.partial(asam, eta=0.0, bias_mask=False)  # what most codes call adaptive
flax_centralize = each(
    lambda g, w: g - g.mean(range(g.ndim - 1), keepdims=True) if g.ndim > 1 else g
)


def gsam(h, base, method=None):
    method = sam(h.rho_max) if method is None else method
    return sharpness_aware(base, method, descent=surrogate_gap(h.alpha))


def gsam_sched(h, base):
    """The radius follows the learning rate, but the code's first step has rho_min."""
    lr = lambda step: optax.cosine_decay_schedule(h.lr, 10)(jnp.maximum(step - 1, 0))
    rho = rho_from_learning_rate(lr, h.rho_min, h.rho_max, 0.0, h.lr)
    first = lambda step: jnp.where(step == 0, h.rho_min, rho(step))
    return gsam(h, torch_base(h, lr=lr), sam(first))


def gsamjax_sched(h, base):
    lr = lambda step: jnp.asarray(h.lr_t)[step]
    rho = rho_from_learning_rate(lr, h.rho_min, h.rho_max, h.lr_min, h.lr_max)
    return gsam(h, torch_base(h, lr=lr), sam(rho))


def gsamjax_adaptive(h, base):
    """Not ASAM: one factor |w|, and the norm of g."""
    return gsam(h, base, optax.chain(sam(h.rho_max), each(lambda e, w: jnp.abs(w) * e)))


def gsamjax_minimizef(h, base):
    """The gap's other order: g + α (g_s without its part along g)."""
    other = surrogate_gap(h.alpha)

    def swapped(g_s, state, params, *, ascent_grads, **extra):
        minus, _ = other.update(ascent_grads, state, ascent_grads=g_s)
        return add(scaled(ascent_grads, 2.0), minus, -1.0), state

    return sharpness_aware(base, sam(h.rho_max), descent=stateless(swapped))


def gsamjax_2workers(h, base):
    """Each worker decomposes its own gradient; with groups=2 the means would be decomposed."""
    gap, method = surrogate_gap(h.alpha), sam(h.rho_max)

    def given(b, params):
        def worker(grad):
            g = grad(params)
            g_s = grad(method.perturb_fn(params, g, method.init(params))[0])
            return gap.update(g_s, optax.EmptyState(), ascent_grads=g)[0]

        return {"grads": scaled(add(worker(b.part(0, 2)), worker(b.part(1, 2))), 0.5)}

    return base, given


def sampa(h, base):
    """For y the code takes a step of SGD: not Nesterov's, and without moments for Adam."""
    given = lambda b, params: {"grad_fn": b.grad, "previous_grad_fn": b.before().grad}
    if h.base in ("sgd", "momentum"):
        return simultaneous(base, sam(h.rho), h.og), given
    ahead = optax.scale(-h.lr) if h.base == "adamw" else torch_base(h, nesterov=False)

    def update(g, state, params, *, perturbed, **extra):
        look = (ahead.update(g, state, params)[0], state)
        return base.update(g, state, params) if perturbed else look

    steps = optax.GradientTransformationExtraArgs(base.init, update)
    return simultaneous(optax.identity(), sam(h.rho), h.og, descent=steps), given


def msam(h, base):
    """The decay is that of the perturbed weights: it lies in the loss, or behind Adam."""
    backwards = optax.chain(sam(h.rho), optax.scale(-1.0))
    if h.base == "adamw":
        decay = each(lambda u, w: u - h.lr * h.weight_decay * (w + u))
        return sharpness_aware(optax.chain(optax.adam(h.lr), decay), momentum_start(backwards))
    if h.base == "sgd":  # whose buffer is the last gradient
        return sharpness_aware(base, momentum_start(backwards, decay=0.0))
    tx = sharpness_aware(optax.sgd(h.lr, h.momentum), momentum_start(backwards))
    return tx, lambda b, params: {"grad_fn": lambda p: add(b.grad(p), p, h.weight_decay)}


def steep(h, base, method):
    return lookbehind(base, method, int(h.k_steps), "adaptive" if h.alpha == -1 else h.alpha)


def climbed(b, params, method, steps, limit=jnp.inf):
    """The displacement after several ascents, each followed by a projection."""
    d = otu.tree_zeros_like(params)
    for _ in range(steps):
        point = add(params, d)
        moved, _ = method.update(b.grad(point), method.init(params), point)
        d, _ = optax.clip_by_global_norm(limit).update(add(d, moved), optax.EmptyState())
    return d


def multistep(h, base, ascend):
    """ascent_steps does not project; with the identity, the ascent gradient is ε itself."""
    given = lambda b, params: {
        "grad_fn": b.grad,
        "ascent_grad_fn": lambda w: climbed(b, w, ascend(h.rho * h.step_size_mult), 3, h.rho),
    }
    return sharpness_aware(base, optax.identity()), given


def looksam(h, base):
    """This unofficial code takes every norm and product by leaf."""
    pieces = {leaf: reuse_orthogonal(h.alpha) for leaf in "abcd"}
    by_leaf = optax.multi_transform(pieces, LEAVES, mask_compatible_extra_args=True)
    return sharpness_aware(base, sam(h.rho), descent=by_leaf, when=every(int(h.k)))


def wsam(h, base, method=None):
    method = sam(h.rho) if method is None else method
    weight = h.gamma / (1 - h.gamma)
    steps = decoupled_sharpness(base, h.lr, weight)
    return sharpness_aware(optax.identity(), method, descent=steps)


def wsam_clip(h, base):
    """ε does not depend on the length of g, so both gradients may be clipped in grad_fn."""

    def clipped(g):
        return scaled(g, jnp.minimum(1, h.max_norm / (norm(g) + 1e-6)))

    return wsam(h, base), lambda b, params: {"grad_fn": lambda p: clipped(b.grad(p))}


def esam(h, base, method=sam):
    """Masks of whole leaves in front of the norm; one example fewer than the share says."""
    n = 16
    share = 1.0 if h.gamma == 1 else (int(n * h.gamma) - 1) / n
    mask = random_mask(h.beta, key=0, whole_leaves=True)
    given = lambda b, params: {
        "grad_fn": rising_samples(losses_fn, params, b.examples, share),
        "ascent_grad_fn": b.grad,
    }
    return sharpness_aware(base, optax.chain(mask, method(h.rho / h.beta))), given


def sparsesam_f(h, base):
    """The code chooses behind the first step of an epoch, and rounds the number of elements down.

    The recorded masks stand for the Fisher information, to which it adds a left-over gradient.
    """
    n = h.mask.shape[1]
    choice = sparsify(1 - int(n * (1 - h.sparsity)) / n, key=0, every=4)
    given = lambda b, params: {
        "grad_fn": b.grad,
        "fisher": unflatten(b.at(h.mask).astype(jnp.float64)),
    }
    return sharpness_aware(base, optax.chain(sam(h.rho), choice), when=after(1)), given


def sparsesam_d(h, base):
    """The code grows by gradients, sparsify at random: here the masks are recorded ones."""
    masked = stateless(
        lambda e, state, params, *, mask, **_: (jax.tree.map(jnp.multiply, e, mask), state)
    )
    given = lambda b, params: {"grad_fn": b.grad, "mask": unflatten(b.at(h.mask))}
    return sharpness_aware(base, optax.chain(sam(h.rho), masked)), given


def zsharp(h, base):
    """Each kernel has its own radius; the biases are SAM's. The paper has one norm for all."""
    filtered = optax.chain(zscore_filter(h.alpha), sam(h.rho))
    rest = optax.identity()
    by_leaf = optax.multi_transform({"a": rest, "b": filtered, "c": rest, "d": filtered}, LEAVES)
    return sharpness_aware(base, optax.chain(sam(h.rho), by_leaf))


def xsam(h, base):
    """For several ascents, v₀ is the direction of ε: the ascent gradient is ε itself."""
    descending = toward_maximum(h.rho_max, every=4, largest=h.alpha_max, candidates=21)
    steps = int(h.steps)
    if steps == 1:
        tx = sharpness_aware(base, sam(h.rho_total), descent=descending)
        return tx, lambda b, params: {"value_fn": b.loss}
    given = lambda b, params: {
        "value_fn": b.loss,
        "ascent_grad_fn": lambda w: climbed(b, w, sam(h.rho_total / steps), steps),
    }
    return sharpness_aware(base, optax.identity(), descent=descending), given


def gam(h, base, method=sam):
    """Finite differences in place of Hessian-vector products, and GSAM's decomposition."""

    def given(b, params):
        def above(p):
            return b.grad(add(p, climbed_once(p)))

        def climbed_once(p):
            up = method(h.grad_rho)
            return up.update(b.grad(p), up.init(p), p)[0]

        def mixed(p):
            plain = add(b.grad(params), b.grad(p), abs(1 - h.grad_beta_0))
            sharp = add(scaled(above(params), h.grad_beta_1), above(p), 1 - h.grad_beta_1)
            return surrogate_gap(h.grad_gamma).update(
                sharp, optax.EmptyState(), ascent_grads=plain
            )[0]

        return {"grad_fn": mixed, "ascent_grad_fn": lambda p: add(above(p), b.grad(p), -1.0)}

    return sharpness_aware(base, method(h.grad_norm_rho)), given


def lpf(h, base):
    tx = sharpness_aware(
        base, low_pass(h.std, key=0, noise_scale="norm"), groups=int(h.M) if h.M > 1 else None
    )
    return tx, lambda b, params: {"grad_fn": lambda p, i=0: b.part(i, int(h.M))(p)}


def rwp(h, base):
    """One half of the batch at w, the other at the random point."""

    def given(b, params):
        mixed = lambda p: add(scaled(b.part(0, 2)(params), 1 - h.alpha), b.part(1, 2)(p), h.alpha)
        return {"grad_fn": mixed}

    return sharpness_aware(base, low_pass(h.gamma, key=0)), given


def awp_method(h):
    relative = each(lambda g, w: h.gamma * norm(w) / norm(g) * g)
    return perturb_only(relative, lambda params: jax.tree.map(lambda w: w.ndim > 1, params))


def awp(h, base):
    """The code steps at w + ε, so the decay is that of the perturbed weights."""
    method = awp_method(h)
    if h.base != "adamw":
        decay = getattr(h, "weight_decay", 0.0)
        given = lambda b, params: {
            "grad_fn": lambda p: add(b.grad(p), p, decay),
            "ascent_grad_fn": b.grad,
        }
        return sharpness_aware(torch_base(h, weight_decay=0.0), method), given

    def update(updates, state, params, *, grad_fn):  # a hand-written step
        point, _ = method.perturb_fn(params, grad_fn(params), method.init(params))
        return base.update(grad_fn(point), state, point)

    return optax.GradientTransformationExtraArgs(base.init, update)


def sagm(h, base):
    ascent = optax.stateless(lambda g, w: scaled(g, h.rho / norm(g) - h.alpha))
    return sharpness_aware(base, ascent, descent=mix_gradients(0.5))


def crsam(h, base):
    def given(b, params):
        def three(point):
            g, q, p = b.grad(params), b.grad(add(scaled(params, 2.0), point, -1.0)), b.grad(point)
            return jax.tree.map(
                lambda g, p, q: p + h.gamma * (p + q - 2 * g) + h.beta * (p - q), g, p, q
            )

        return {"grad_fn": three, "ascent_grad_fn": b.grad}

    return sharpness_aware(base, sam(h.rho)), given


def eigensam(h, base):
    """v is recorded; before the first one, the code does not normalize g."""
    recorded = jnp.concatenate([jnp.zeros((1, h.v.shape[1])), jnp.asarray(h.v)])

    def given(b, params):
        v = unflatten(recorded[b.i // 3])

        def displacement(w):
            g = b.grad(w)
            u = scaled(g, 1 / norm(g))
            rest = add(v, u, -otu.tree_vdot(u, v))
            eps = scaled(add(u, rest, h.alpha * jnp.sign(otu.tree_vdot(g, v))), h.rho)
            return jax.tree.map(lambda e, x: jnp.where(b.i < 3, h.rho * x, e), eps, g)

        return {"grad_fn": b.grad, "ascent_grad_fn": displacement}

    return sharpness_aware(base, optax.identity()), given


def tsam(h, base):
    """SAM from several random starts; the weights softmax(t L) are the gradient of a logsumexp."""
    method = sam(h.rho)

    def given(b, params):
        def displacement(z):
            z = scaled(unflatten(z), h.scaling if h.epsilon == "gaussian" else 1e9)
            start, _ = optax.clip_by_global_norm(h.radius).update(z, optax.EmptyState())
            at = add(params, start)
            return add(start, method.update(b.grad(at), method.init(at), at)[0])

        ascents = [displacement(z) for z in b.at(h.z)]
        tilted = lambda p: (
            jax.nn.logsumexp(jnp.stack([h.tilt * b.loss(add(p, e)) for e in ascents])) / h.tilt
        )
        return {"grads": jax.grad(tilted)(params)}

    return base, given


def rst(h, base, descending=None):
    """bernoulli, with the recorded flags; the decay is in the loss, and the gradient clipped."""
    if h.base != "adamw":
        base = torch_base(h, weight_decay=0.0)
    base = optax.chain(optax.clip_by_global_norm(h.gradient_clipping), base)
    tx = sharpness_aware(
        base,
        sam(h.r),
        descent=mix_gradients(h.alpha) if descending is None else descending,
        when=lambda step: jnp.asarray(h.sam_flag)[step],
    )
    return tx, lambda b, params: {"grad_fn": lambda p: add(b.grad(p), p, h.l2_regularization)}


def grst_normed(h, base):
    """The code's default mixes g_s with the unit vector, and g in steps that do not perturb."""

    def update(g_s, state, params=None, *, ascent_grads, perturbed, **extra):
        a = jnp.where(perturbed, h.alpha, 1.0)
        length = norm(ascent_grads)
        return add(scaled(g_s, a), ascent_grads, (1 - a) / length), state

    return rst(h, base, stateless(update))


def dpsat(h, base, decay=0.0):
    """Ascent along the last private gradient, or along the base optimizer's last step."""

    def given(b, params):
        def private(p):
            one = lambda x, y: jax.grad(lambda p: losses_fn(p, (x, y)))(p)
            grads = jax.vmap(one)(*b.examples)
            norms = jax.vmap(norm)(grads)
            share = jnp.minimum(1, h.max_grad_norm / (norms + 1e-6))
            total = jax.tree.map(lambda g: jnp.tensordot(share, g, 1), grads)
            draw = unflatten(b.at(h.z) * h.noise_multiplier * h.max_grad_norm)
            return scaled(add(total, draw), 1 / h.expected_batch_size)

        return {"grad_fn": private}

    return sharpness_aware(base, momentum_start(sam(h.rho), decay)), given


def focalsam(h, base):
    counts = jnp.asarray(file("focalsam")["cls_num_list"])
    weights = h.sharpness * (1 - counts / counts.sum()) ** h.flat_gamma

    def given(b, params):
        focal = b.weighted(weights)
        grad_fn = lambda p: add(b.weighted(1 - weights)(params), focal(p))
        return {"grad_fn": grad_fn, "ascent_grad_fn": focal}

    return sharpness_aware(base, sam(h.rho)), given


def message_passing(b, adj, kernel=None):
    """The gradient of the GNN, with another kernel in the backward pass of the last layer."""
    x, y = b.examples
    stop = jax.lax.stop_gradient

    def loss(p):
        h = jnp.tanh(adj @ (x @ p["fc1"]["kernel"]) + p["fc1"]["bias"])
        behind = p["fc2"]["kernel"] if kernel is None else kernel
        z = adj @ (stop(h) @ p["fc2"]["kernel"] + (h - stop(h)) @ stop(behind)) + p["fc2"]["bias"]
        return optax.softmax_cross_entropy_with_integer_labels(z, y).mean()

    return jax.grad(loss)


def fgsam(h, base):
    """The code's second gradient of the GNN has the activations of w and the weights of w + ε.

    With that at w it would be ``descent=mix_gradients(lam)`` and ``grad_fn=b.grad``.
    """

    def given(b, params):
        def mixed(p):
            stale = message_passing(b, h.adj, p["fc2"]["kernel"])(params)
            return add(scaled(stale, 1 - h.lam), b.grad(p), h.lam)

        return {"grad_fn": mixed, "ascent_grad_fn": message_passing(b, h.adj)}

    return sharpness_aware(base, sam(h.rho)), given


def fgsamplus(h, base):
    """LookSAM on the MLP's gradient, by leaf, with ε from the GNN's."""
    pieces = {leaf: reuse_orthogonal(h.alpha) for leaf in "abcd"}
    by_leaf = optax.multi_transform(pieces, LEAVES, mask_compatible_extra_args=True)
    of_gnn = stateless(lambda g, state, params, *, gnn, **_: (gnn, state))
    ascent = optax.chain(of_gnn, sam(h.rho))

    def given(b, params):
        gnn = message_passing(b, h.adj)(params)
        mixed = lambda p: add(scaled(gnn, 1 - h.lam), b.grad(p), h.lam)
        return {"grads": b.grad(params), "grad_fn": mixed, "gnn": gnn}

    return sharpness_aware(base, ascent, descent=by_leaf, when=every(int(h.k))), given


def by_layer(h):
    """T of SAM-ON's code: η multiplies."""
    biases = getattr(h, "normalize_bias", False)
    length = lambda w: jnp.linalg.norm(w) * (1 + h.eta)
    return each(lambda g, w: length(w) * g if w.ndim > 1 or biases else g)


def norm_layers(chosen):
    return lambda params: {layer: (layer == "norm") == chosen for layer in params}


LINF = functools.partial(sam, p=jnp.inf)
SAM_ON = {
    "elementwise_l2": lambda h: asam(h.rho, h.eta),
    "elementwise_l2_bias": lambda h: asam(h.rho, h.eta, bias_mask=False),
    "elementwise_linf": lambda h: asam(h.rho, h.eta, p=jnp.inf),
    "layerwise_l2": lambda h: optax.chain(by_layer(h), sam(h.rho), by_layer(h)),
    "layerwise_linf_bias": lambda h: optax.chain(LINF(h.rho), by_layer(h)),
    # The script's default has the sign of w: for p = 2 it has no effect, and η is not used.
    "signed_l2": lambda h: asam(h.rho, 0.0),
    "signed_linf": lambda h: optax.chain(
        LINF(h.rho), each(lambda e, w: w * e if w.ndim > 1 else e)
    ),
    "ln_sam_only_norm": lambda h: perturb_only(sam(h.rho), norm_layers(True)),
    "ln_sam_no_norm": lambda h: perturb_only(sam(h.rho), norm_layers(False)),
    "ln_asam_only_norm": lambda h: perturb_only(asam(h.rho, h.eta), norm_layers(True)),
    "ln_asam_linf_only_norm": lambda h: perturb_only(
        asam(h.rho, h.eta, p=jnp.inf, bias_mask=False), norm_layers(True)
    ),
}


def plain(method):
    return lambda h, base: sharpness_aware(base, method(h))


METHODS = {
    "sam": plain(lambda h: sam(h.rho)),
    "asam": plain(lambda h: asam(h.rho, h.eta)),
    "fsam": plain(lambda h: fsam(h.rho, h.sigma, h.lmbda)),
    "fsam_sigma1": plain(lambda h: fsam(h.rho, h.sigma, h.lmbda)),
    "fsam_adaptive": plain(
        lambda h: optax.chain(remove_full_gradient(h.sigma, h.lmbda), every_leaf(h.rho))
    ),
    "gsam": gsam,
    "gsam_adaptive": lambda h, base: gsam(h, base, every_leaf(h.rho_max)),
    "gsam_linearrho": lambda h, base: gsam(
        h, base, sam(optax.linear_schedule(h.rho_max, h.rho_min, 10))
    ),
    "gsam_sched": gsam_sched,
    "gsamjax": gsam,
    "gsamjax_sched": gsamjax_sched,
    "gsamjax_adaptive": gsamjax_adaptive,
    "gsamjax_minimizef": gsamjax_minimizef,
    "gsamjax_2workers": gsamjax_2workers,
    "sampa": sampa,
    "vasso": plain(lambda h: optax.chain(smooth_gradient(1 - h.theta), sam(h.rho))),
    "msam": msam,
    "lookbehind": lambda h, base: steep(h, base, sam(h.rho)),
    "lookbehind_adaptive": lambda h, base: steep(h, base, sam(h.rho)),
    "lookbehind_asam": lambda h, base: steep(h, base, asam(h.rho, h.eta)),
    # The norm is that of g itself, and the descent is not centralized; the paper differs in both.
    "gcsam": plain(lambda h: optax.chain(sam(h.rho), flax_centralize)),
    "ssam": lambda h, base: sharpness_aware(base, sam(h.rho), descent=match_ascent_norm()),
    "ssam_unnormalized": lambda h, base: sharpness_aware(
        base, optax.scale(h.rho), descent=match_ascent_norm()
    ),
    "usam": plain(lambda h: optax.scale(h.rho)),
    "usam_adaptive": plain(lambda h: each(lambda g, w: h.rho * w**2 * g)),
    "usamclip": plain(lambda h: optax.chain(optax.scale(h.rho), optax.clip_by_global_norm(h.rho))),
    "multistep_sam": lambda h, base: multistep(h, base, sam),
    "multistep_usamclip": lambda h, base: multistep(h, base, optax.scale),
    "looksam": looksam,
    "looksam_global": lambda h, base: sharpness_aware(
        base, sam(h.rho), descent=reuse_orthogonal(h.alpha), when=every(int(h.k))
    ),
    "wsam": wsam,
    "wsam_coupled": lambda h, base: sharpness_aware(
        base, sam(h.rho), descent=mix_gradients(h.gamma / (1 - h.gamma))
    ),
    "wsam_clip": wsam_clip,
    "wsam_adaptive": lambda h, base: wsam(h, base, every_leaf(h.rho)),
    "esam": esam,
    "esam_gamma": esam,
    "esam_beta": esam,
    "esam_adaptive": lambda h, base: esam(h, base, every_leaf),
    "sparsesam_f": sparsesam_f,
    "sparsesam_d": sparsesam_d,
    "fishersam": plain(lambda h: fisher_sam(h.gamma, h.eta)),
    "zsharp": zsharp,
    "zsharp_95": zsharp,
    "xsam": xsam,
    "xsam_dyn2": xsam,
    "gam": gam,
    "gam_adaptive": lambda h, base: gam(h, base, every_leaf),
    "lpfsgd_m1": lpf,
    "lpfsgd_m4": lpf,
    "rwp": rwp,
    "awp": awp,
    "sagm": sagm,
    "crsam": crsam,
    "eigensam": eigensam,
    "tsam": tsam,
    "tsam_clipped": tsam,
    "tsam_uniform": tsam,
    "rst": rst,
    "grst": rst,
    "grst_clip": rst,
    "grst_normed": grst_normed,
    "dpsat": dpsat,
    "dpsat_clean": dpsat,
    "dpsatmom": lambda h, base: dpsat(h, base, 0.0 if h.base == "sgd" else None),
    "focalsam": focalsam,
    "fgsam": fgsam,
    "fgsamplus": fgsamplus,
    **{f"samon_{name}": plain(method) for name, method in SAM_ON.items()},
}
