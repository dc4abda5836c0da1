"""``--init``: networks that start from the params of a file, and the conversion of others'."""

import dataclasses
import hashlib
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import pytest
import tasks
from flax.traverse_util import unflatten_dict

from sam_optax.__main__ import main
from sam_optax.experiments import named
from sam_optax.experiments.data.dataset import load
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.networks.registry import ARCHITECTURES
from sam_optax.experiments.networks.vit import VisionTransformer
from sam_optax.experiments.reporting import results, snapshots
from sam_optax.experiments.training import devices, initial
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


@pytest.fixture
def small(monkeypatch):
    """A tiny ViT in the place of ViT-S/16."""
    make = partial(VisionTransformer, width=WIDTH, depth=DEPTH, heads=HEADS, patch=PATCH)
    monkeypatch.setitem(ARCHITECTURES, "vit_s16", ARCHITECTURES["vit_s16"]._replace(make=make))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Archives of images of 8×8 in five classes and in three."""
    folder = tmp_path_factory.mktemp("pictures")
    x = np.random.default_rng(1).random((24, 8, 8, 3))
    for classes in (5, 3):
        train, test = {"x_train": x[:16], "x_test": x[16:]}, np.arange(8) % classes
        labels = {"y_train": np.arange(16) % classes, "y_test": test}
        np.savez(folder / f"{classes}.npz", **train, **labels)
    return folder


SCRIPT = Path(__file__).parents[2] / "notebooks" / "from_safetensors.py"


def save(path, tensors):
    """The file of the tensors that the script makes."""
    converted = named.find(f"{SCRIPT}:converted")
    converted.__globals__["HEAD"] = WIDTH // HEADS
    np.savez(path, **converted(tensors))
    return path


def command(folder, classes, *more):
    data = ["--dataset", f"npz:{folder / f'{classes}.npz'}", "--model", "vit_s16"]
    options = ["--methods", "sam", "--seeds", "1", "--batch-size", "8", "--epochs", "1"]
    return ["compare", *data, *options, *more]


@pytest.mark.parametrize("names", [lambda tensors: tensors, renamed], ids=["timm", "Hugging Face"])
@pytest.mark.usefixtures("small")
def test_a_vision_transformer_computes_what_the_file_s_does(pretrained, names, pictures, tmp_path):
    path = save(tmp_path / "vit.npz", names(pretrained))
    task = tasks.make(load(f"npz:{pictures / '5.npz'}"), "sgd", model="vit_s16")
    start, new = initial.load(str(path), task)
    assert not new
    variables = unflatten_dict(start, sep="/")
    images = task.dataset.test.x[:2]
    logits = jax.jit(partial(task.model.apply, train=False))(variables, images)
    expected = [forward(pretrained, image) for image in images]
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.fixture
def networks(tmp_path):
    """A file of two networks of the model mlp, for 6 features and 3 classes."""
    sizes = {"Dense_0": (6, 256), "Dense_1": (256, 256), "Dense_2": (256, 3)}

    def of(i):
        full = lambda shape: np.full(shape, 1.0 + i)
        return {"params": {k: {"kernel": full(s), "bias": full(s[1])} for k, s in sizes.items()}}

    path = tmp_path / "params.npz"
    path.write_bytes(snapshots.to_npz({"sam rho 0.1": {0: of(0), 7: of(7)}}, {}))
    return path


def test_every_seed_starts_with_the_network_of_the_file(arrays, networks):
    task = tasks.make(tasks.vectors(arrays), "sgd", "sam", model="mlp", seeds=2)
    start, new = initial.load(f"{networks}:sam rho 0.1/7", task)
    task = dataclasses.replace(task, initial=start)
    for runner in Training(task, devices.choose(1)).runners:
        leaves = jax.tree.leaves(runner.variables)
        assert (len(leaves), new) == (6, [])
        assert all(leaf.shape[0] == 2 and (leaf == 8).all() for leaf in leaves)


def test_a_network_that_is_not_finite_is_refused(arrays, networks):
    loaded = snapshots.load_params(networks)
    loaded["sam rho 0.1"][0]["params"]["Dense_1"]["bias"][2] = np.nan
    networks.write_bytes(snapshots.to_npz(loaded, {}))
    task = tasks.make(tasks.vectors(arrays), "sgd", model="mlp")
    with pytest.raises(UserError, match="params/Dense_1/bias: not all values are finite numbers"):
        initial.load(f"{networks}:sam rho 0.1/0", task)


@pytest.mark.usefixtures("small")
def test_the_head_is_new_for_other_classes_and_the_file_is_part_of_the_run(
    capsys, trainer, pretrained, pictures, tmp_path, monkeypatch
):
    monkeypatch.setattr("sam_optax.experiments.comparison._draw", lambda *args: None)
    path, out = save(tmp_path / "vit.npz", pretrained), tmp_path / "out"
    more = ("--init", str(path), "--out", str(out))
    assert main(command(pictures, 3, *more)) == 0
    missing = {"params/Dense_0/kernel", "params/Dense_0/bias"}
    assert not missing & trainer.task.initial.keys()
    assert trainer.task.initial.keys() > {"params/token", "params/Block_1/Dense_0/bias"}
    found = results.from_json(out / "results.json")
    (note,) = [note for note in found["notes"] if "--init" in note]
    assert missing == set(note.removesuffix(".").split(": ")[1].split(", "))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert found["settings"]["init_sha256"] == {"value": digest, "source": "of the file"}
    assert main(command(pictures, 3, *more, "--resume")) == 0
    save(path, {**pretrained, "norm.bias": pretrained["norm.bias"] + 1})
    capsys.readouterr()
    assert main(command(pictures, 3, *more, "--resume")) == 2
    error = capsys.readouterr().err
    assert re.search("--resume: .* with other settings: the file of --init has changed\\. ", error)


WRONG = {
    "distilled": (
        {"blocks.2.norm1.bias": np.ones(3)},
        r"params/Block_2/LayerNorm_0/bias: \(3,\) in the file, no such array here; give the --mod",
    ),
    "lacking": ({"norm.weight": None}, "params/LayerNorm_0/scale: no such array in the file"),
    "size": (
        {"pos_embed": np.ones((1, 10, WIDTH))},
        r"params/positions: \(1, 10, 12\) in the file, \(1, 5, 12\) here; give .* the size of",
    ),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
@pytest.mark.usefixtures("small")
def test_tensors_that_do_not_fit_are_named(
    capsys, trainer, pretrained, pictures, tmp_path, change, message
):
    tensors = {k: v for k, v in (pretrained | change).items() if v is not None}
    path = save(tmp_path / "vit.npz", tensors)
    assert main(command(pictures, 5, "--init", str(path))) == 2
    assert re.match(f"sam_optax: --init {path}: {message}", capsys.readouterr().err)


NEITHER = "is damaged, or not the params.npz of a run; give one."
NAMES = "it has sam rho 0.1/0, sam rho 0.1/7."
REFUSED = [
    (["--init", "nowhere.npz"], "--init nowhere.npz: cannot be read (no such file"),
    (["--init", ""], "--init: is empty; give a value, or leave it out"),
    (["--init", "{data}"], "{data}: " + NEITHER),
    (["--init", "{data.parent}/text.npz"], "text.npz: " + NEITHER),
    (["--init", "{file}"], "name one of its networks, as in {file}:sam rho 0.1/0; " + NAMES),
    (["--init", "{file}:sam/0"], NAMES),
    (["--init", "{file}:sam rho 0.1/0", "--model", "cnn"], "params/Conv_0/bias: no such array in"),
    (["--preset", "fsam-transfer", "--model", "cnn", "--devices", "1"], "give --init FILE, DeiT-s"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_files_and_networks_that_are_not_there_are_told(
    capsys, trainer, pictures, networks, options, message
):
    places = {"data": pictures / "5.npz", "file": networks}
    (pictures / "text.npz").write_text("a")
    given = ["compare", "--dataset", f"npz:{places['data']}", "--batch-size", "8"]
    assert main([*given, *[option.format(**places) for option in options]]) == 2
    assert message.format(**places) in capsys.readouterr().err


def test_tensors_of_other_networks_are_refused_by_name(pretrained, tmp_path):
    with pytest.raises(SystemExit, match=r"head_dist.bias: not a tensor of a ViT or DeiT."):
        save(tmp_path / "vit.npz", pretrained | {"head_dist.bias": np.ones(3)})


def test_a_file_that_cannot_be_converted_is_one_line(tmp_path):
    path = tmp_path / "model.safetensors"
    header = b'{"a":{"dtype":"F8_E4M3","shape":[4],"data_offsets":[0,4]}}'  # case 80
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    command = [sys.executable, str(SCRIPT), str(path), str(tmp_path / "out.npz")]
    process = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert process.returncode == 1
    assert process.stderr.startswith(f"{path}: cannot be read (")
    assert process.stderr.count("\n") == 1
    assert not (tmp_path / "out.npz").exists()
