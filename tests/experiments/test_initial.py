"""Networks that start from given variables: of earlier runs, and of others' files."""

import re
from functools import partial
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import save_file

from sam_optax.__main__ import main
from sam_optax.experiments import compare, named
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.training import devices
from sam_optax.experiments.training.train import Training

WIDTH, DEPTH, HEADS, PATCH = 12, 2, 3, 4
pytestmark = pytest.mark.usefixtures("compile_fast")


@pytest.fixture(scope="module")
def pretrained():
    """The tensors of a tiny ViT for images of 8×8, by timm's names, with 5 classes."""
    rng = np.random.default_rng(0)
    dense = {"head": (5, WIDTH)}
    shapes = {"cls_token": (1, 1, WIDTH), "pos_embed": (1, 5, WIDTH)}
    shapes |= {
        "patch_embed.proj.weight": (WIDTH, 3, PATCH, PATCH),
        "patch_embed.proj.bias": (WIDTH,),
    }
    norms = ["norm"]
    for i in range(DEPTH):
        at = f"blocks.{i}"
        norms += [f"{at}.norm1", f"{at}.norm2"]
        dense |= {f"{at}.attn.qkv": (3 * WIDTH, WIDTH), f"{at}.attn.proj": (WIDTH, WIDTH)}
        dense |= {f"{at}.mlp.fc1": (4 * WIDTH, WIDTH), f"{at}.mlp.fc2": (WIDTH, 4 * WIDTH)}
    for name, shape in {**dense, **dict.fromkeys(norms, (WIDTH,))}.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return {
        name: (rng.normal(size=shape) / 3 + ("norm" in name)).astype(np.float32)
        for name, shape in shapes.items()
    }


def renamed(pretrained):
    """The same as Hugging Face's DeiT names them."""
    names = {
        **{"cls_token": "embeddings.cls_token", "pos_embed": "embeddings.position_embeddings"},
        **{"patch_embed.proj": "embeddings.patch_embeddings.projection", "head": "classifier"},
        **{"norm1": "layernorm_before", "norm2": "layernorm_after", "norm": "layernorm"},
        **{"mlp.fc1": "intermediate.dense", "mlp.fc2": "output.dense"},
        **{"attn.proj": "attention.output.dense"},
    }
    found = {"deit.pooler.dense.bias": np.zeros(WIDTH, np.float32)}
    for name, value in pretrained.items():
        where, stem, kind = re.fullmatch(r"(blocks\.\d\.)?(.*?)(\.weight|\.bias)?", name).groups("")
        where = where.replace("blocks", "encoder.layer")
        if stem == "attn.qkv":
            for part, tensor in zip(("query", "key", "value"), np.split(value, 3), strict=True):
                found[f"deit.{where}attention.attention.{part}{kind}"] = tensor
        else:
            prefix = "" if stem == "head" else "deit."
            found[f"{prefix}{where}{names[stem]}{kind}"] = value
    return found


def forward(tensors, image):
    """The logits of timm's network for an image (8, 8, 3), in NumPy."""

    def dense(x, name):
        return x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]

    def norm(x, name):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
        return x * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]

    def patch(i, j):
        pixels = image[4 * i : 4 * i + 4, 4 * j : 4 * j + 4].transpose(2, 0, 1)
        kernel = tensors["patch_embed.proj.weight"].reshape(WIDTH, -1)
        return kernel @ pixels.ravel() + tensors["patch_embed.proj.bias"]

    x = np.stack([tensors["cls_token"][0, 0], *(patch(i, j) for i in (0, 1) for j in (0, 1))])
    x = x + tensors["pos_embed"][0]
    for i in range(DEPTH):
        at = f"blocks.{i}"
        qkv = dense(norm(x, f"{at}.norm1"), f"{at}.attn.qkv").reshape(5, 3, HEADS, -1)
        q, k, v = qkv.transpose(1, 2, 0, 3)
        weights = np.exp(q @ k.transpose(0, 2, 1) / np.sqrt(WIDTH // HEADS))
        y = (weights / weights.sum(-1, keepdims=True)) @ v
        x = x + dense(y.transpose(1, 0, 2).reshape(5, WIDTH), f"{at}.attn.proj")
        y = np.asarray(nn.gelu(dense(norm(x, f"{at}.norm2"), f"{at}.mlp.fc1")))
        x = x + dense(y, f"{at}.mlp.fc2")
    return dense(norm(x[0], "norm"), "head")


SCRIPT = Path(__file__).parents[2] / "notebooks" / "from_safetensors.py"


@pytest.fixture
def convert(tmp_path):
    """A function of tensors and the number of classes: what the script makes of their file."""
    vit = named.find(f"{SCRIPT.with_name('vit.py')}:VisionTransformer")
    network = partial(vit, width=WIDTH, depth=DEPTH, heads=HEADS, patch=PATCH)
    function, path = named.find(f"{SCRIPT}:pretrained"), tmp_path / "vit.safetensors"
    function.__globals__["HEAD"] = WIDTH // HEADS

    def convert(tensors, classes):
        save_file(tensors, path)
        return function(str(path), network, classes)

    return convert


@pytest.mark.parametrize("names", [lambda tensors: tensors, renamed], ids=["timm", "Hugging Face"])
def test_a_vision_transformer_computes_what_the_file_s_does(pretrained, names, convert):
    module, variables = convert(names(pretrained), 5)
    images = np.random.default_rng(1).random((2, 8, 8, 3), np.float32)
    logits = jax.jit(partial(module.apply, train=False))(unflatten_dict(variables, "/"), images)
    expected = [forward(pretrained, image) for image in images]
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


def test_the_head_of_other_classes_is_left_out(pretrained, convert):
    with_head, without = (convert(pretrained, classes)[1].keys() for classes in (5, 3))
    assert with_head - without == {"params/Dense_0/kernel", "params/Dense_0/bias"}
    assert without > {"params/token", "params/Block_1/Dense_0/bias"}


def test_tensors_of_other_networks_are_refused_by_name(pretrained, convert):
    with pytest.raises(ValueError, match=r"head_dist.bias: not a tensor of a ViT or DeiT"):
        convert(pretrained | {"head_dist.bias": np.ones(3)}, 5)


class Net(nn.Module):
    """A body, and a head for so many classes."""

    classes: int

    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(4)(x))
        return nn.Dense(self.classes)(x)


class Nnx(nnx.Module):
    """The head alone, with a BatchNorm."""

    def __init__(self, classes, rngs):
        self.norm, self.head = nnx.BatchNorm(6, rngs=rngs), nnx.Linear(6, classes, rngs=rngs)

    def __call__(self, x):
        return self.head(self.norm(x))


quick = partial(compare, methods=["sgd"], epochs=1, batch_size=20, weight_decay=0.0)
FILE = """
from sam_optax.experiments.reporting.archive import load_params
from test_initial import Net
def again(classes):
    variables = load_params({path!r})["sgd"][1]
    del variables["params"]["Dense_1"]
    return Net(classes), variables
"""


def test_every_seed_starts_from_a_network_of_an_earlier_run(
    archive, trainer, monkeypatch, tmp_path, capsys
):
    """By a file; what it leaves out is initialized, and told."""
    monkeypatch.setattr("sam_optax.experiments.comparison._draw", lambda *args: None)
    (tmp_path / "net.py").write_text(FILE.format(path=str(tmp_path / "params.npz")))
    before = Net(3).init(jax.random.key(7), np.ones((1, 6)))["params"]
    body = before["Dense_0"]
    np.savez(
        tmp_path / "params.npz",
        **{f"sgd/1/params/{name}": of for name, of in flatten_dict(before, sep="/").items()},
    )
    options = ["--dataset", f"npz:{archive}", "--seeds", "2", "--batch-size", "20", "--epochs", "1"]
    options += ["--methods", "sgd", "--model", f"{tmp_path}/net.py:again"]
    assert main(["compare", *options]) == 0
    printed = capsys.readouterr().err
    missing = "params/Dense_1/bias, params/Dense_1/kernel"
    assert f"Not among the variables of --model: {missing}.\n" in printed
    (runner,) = Training(trainer.task, devices.choose(1)).runners
    found = [variables["params"] for variables in runner.variables]  # of each seed
    for params in found:
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, [b]), params["Dense_0"], body)
    assert np.any(found[0]["Dense_1"]["kernel"] != found[1]["Dense_1"]["kernel"])


@pytest.mark.parametrize(
    "network", [Net, Nnx, lambda classes: (Nnx, {})], ids=["linen", "nnx", "f"]
)
def test_a_pair_from_python_starts_from_its_variables(data, network, tmp_path):
    options = {"lr": 1e-30, "momentum": 0.0, "seeds": 2, "model": network}
    first = quick(**data, **options).params["sgd"]
    assert any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, first.values()), strict=True))
    again = quick(**data, **options | {"model": (network, first[1])}, out=tmp_path)
    name = again.results["settings"]["model"]["value"]
    assert name == network.__name__
    for found in again.params["sgd"].values():
        close = partial(np.testing.assert_allclose, atol=1e-20)
        jax.tree.map(close, found["params"], first[1]["params"])


def bias(value, layer="Dense_0"):
    return {"params": {layer: {"bias": value}}}


NONE = r"has shape \(3,\), in the network no such array; "
WRONG = {
    "another name": (bias(np.ones(3), "Dense_2"), f"params/Dense_2/bias of its variables {NONE}"),
    "another shape": (bias(np.ones(3)), r"params/Dense_0/bias .* in the network \(4,\); give one"),
    "NaN": (bias(np.array([0, 1, np.nan, 2])), "params/Dense_0/bias .* is not all finite numbers"),
    "large": (bias(np.full(4, 1e300)), "params/Dense_0/bias .* is not all finite numbers"),
    "text": (bias(np.array(list("abcd"))), "params/Dense_0/bias .* is not all finite numbers"),
    "nothing": (None, "its variables are of type NoneType; give nested dicts"),
    "no array": ({"params": {}}, "its variables are empty; leave them out, or give arrays"),
    "a key": (bias(jax.random.key(0)), "params/Dense_0/bias .* is of type PRNGKeyArray; give"),
    "ragged": (bias([[1, 2], [3]]), "params/Dense_0/bias .* is of type list; give nested dicts"),
    "a state": ({"params": nnx.State({})}, "params of its variables is of type State; give"),
}


@pytest.mark.parametrize(("variables", "message"), WRONG.values(), ids=WRONG)
def test_variables_that_do_not_fit_are_named(data, trainer, variables, message):
    with pytest.raises(UserError, match=f"^--model Net: {message}"):
        quick((Net, variables), **data)
