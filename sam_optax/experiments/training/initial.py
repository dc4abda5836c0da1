"""Initial params from a file: a network of a run, or a vision transformer in safetensors."""

import hashlib
import importlib.util
import os
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from sam_optax.experiments.errors import UserError
from sam_optax.experiments.networks.vit import VisionTransformer
from sam_optax.experiments.reporting.results import load_params
from sam_optax.experiments.training.task import Task
from sam_optax.experiments.types import PyTree

_POSITIONS = "params/positions"
_ATTENTION = "MultiHeadDotProductAttention_0"
_NAMES = {  # of timm, and of Hugging Face's ViT and DeiT: ours
    "cls_token embeddings.cls_token": "token",
    "pos_embed embeddings.position_embeddings": "positions",
    "patch_embed.proj embeddings.patch_embeddings.projection": "Conv_0",
    "norm layernorm": "LayerNorm_0",
    "head classifier": "Dense_0",
}
_NAMES_IN_BLOCKS = {
    "norm1 layernorm_before": "LayerNorm_0",
    "norm2 layernorm_after": "LayerNorm_1",
    "mlp.fc1 intermediate.dense": "Dense_0",
    "mlp.fc2 output.dense": "Dense_1",
    "attn.query attention.attention.query": f"{_ATTENTION}/query",  # timm's after splitting
    "attn.key attention.attention.key": f"{_ATTENTION}/key",
    "attn.value attention.attention.value": f"{_ATTENTION}/value",
    "attn.proj attention.output.dense": f"{_ATTENTION}/out",
}
_OURS = {
    name: ours for names, ours in (_NAMES | _NAMES_IN_BLOCKS).items() for name in names.split()
}


def sha256(spec: str) -> str:
    """The digest of the file of ``--init``."""
    path, _ = _split(spec)
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"--init {spec}: cannot be read ({reason}).") from error


def load(spec: str, task: Task) -> tuple[dict[str, np.ndarray], list[str]]:
    """The variables of ``FILE[:METHOD/SEED]`` by path, as the network of the task has them.

    And the names of what they lack: the head, if its shape differs or it is not in the file. It is
    what depends on the number of classes.

    Raises:
      UserError: the file has no such network, or the network of the task has other arrays.
    """
    path, network = _split(spec)
    ours, other = (_arrays(task, task.dataset.classes + more) for more in (0, 1))
    head = {name for name, leaf in ours.items() if leaf.shape != other[name].shape}
    try:
        if path.suffix == ".safetensors":
            theirs = _vision_transformer(path, ours, task)
        else:
            theirs = _of_run(path, network)
        if task.dataset.text and _POSITIONS in theirs:  # those of shorter texts are the first ones
            theirs[_POSITIONS] = theirs[_POSITIONS][:, : task.dataset.shape[0]]
        for name in {**ours, **theirs}:
            found, needed = (
                getattr(of.get(name), "shape", "no such array") for of in (theirs, ours)
            )
            if found != needed and name not in head:
                give = "the --model that the file is of"
                if name == _POSITIONS and len(found) == len(needed) == 3:
                    give = "examples of the size that the file is of"
                    if task.dataset.text:
                        give = f"--length {found[1]}, that of the file, or less"
                raise UserError(f"{name}: {found} in the file, {needed} here; give {give}.")
    except UserError as error:
        raise UserError(f"--init {spec}: {error}") from error
    kept = {name: leaf for name, leaf in theirs.items() if leaf.shape == ours[name].shape}
    return kept, [name for name in ours if name not in kept]


def start(initial: Mapping[str, np.ndarray], variables: PyTree) -> PyTree:
    """Variables with an axis of seeds in front, with the initial ones in their places."""
    own = flax.traverse_util.flatten_dict(variables, sep="/")
    own |= {
        name: jnp.broadcast_to(jnp.asarray(value, own[name].dtype), own[name].shape)
        for name, value in initial.items()
    }
    return flax.traverse_util.unflatten_dict(own, sep="/")


def _split(spec: str) -> tuple[Path, str]:
    """The file, and method and seed, if they are given."""
    path, _, network = spec.rpartition(":")
    if not path or os.path.exists(os.path.expanduser(spec)):
        path, network = spec, ""
    return Path(path).expanduser(), network


def _arrays(task: Task, classes: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The variables of the task's network, without values, by path."""
    init = partial(task.model.clone(classes=classes).init, train=False)
    found = jax.eval_shape(init, jax.random.key(0), task.example)
    return flax.traverse_util.flatten_dict(found, sep="/")


def _of_run(path: Path, network: str) -> dict[str, np.ndarray]:
    """A network of a ``params.npz``, which may be the only one."""
    try:
        loaded = load_params(path)
    except UserError as error:
        raise UserError(
            "is damaged, or neither the params.npz of a run nor .safetensors; give one of these."
        ) from error
    networks = {
        f"{method}/{seed}": variables
        for method, seeds in loaded.items()
        for seed, variables in seeds.items()
    }
    if not network and len(networks) == 1:
        (network,) = networks
    if network not in networks:
        first = next(iter(networks), "METHOD/SEED")
        has = ", ".join(networks) or "none"
        raise UserError(f"name one of its networks, as in {path}:{first}; it has {has}.")
    return flax.traverse_util.flatten_dict(networks[network], sep="/")


def _vision_transformer(
    path: Path, like: Mapping[str, jax.ShapeDtypeStruct], task: Task
) -> dict[str, np.ndarray]:
    """The tensors of a ViT or DeiT as ours; those with unknown names keep these."""
    if not isinstance(task.model, VisionTransformer):
        raise UserError("safetensors are read for the vision transformers; use --model vit_s16.")
    if importlib.util.find_spec("safetensors") is None:
        raise UserError('safetensors is not installed; run pip install "sam_optax[hf]".')
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        tensors = load_file(path)
    except (SafetensorError, OSError, KeyError) as error:
        raise UserError(f"is not a readable file of safetensors ({error}).") from error
    found = {}
    for name, value in tensors.items():
        short = re.sub(r"^(vit|deit)\.", "", name)
        stem, kind = short, ""
        if short.endswith((".weight", ".bias")):
            stem, _, kind = short.rpartition(".")
        block = re.match(r"(?:blocks|encoder\.layer)\.(\d+)\.(.*)", stem)
        where, stem = (f"params/Block_{block[1]}/", block[2]) if block else ("params/", stem)
        if stem.startswith("pooler."):  # which classification does not use
            continue
        parts = {stem: value}
        if stem == "attn.qkv":
            names = ("attn.query", "attn.key", "attn.value")
            parts = dict(zip(names, np.array_split(value, 3), strict=True))
        for part, tensor in parts.items():
            ours = where + _OURS[part] if part in _OURS else name
            if kind and part in _OURS:
                scale = "scale" if "LayerNorm" in ours else "kernel"
                ours += f"/{scale if kind == 'weight' else 'bias'}"
            if tensor.ndim in (2, 4):  # PyTorch's (out, in[, height, width])
                tensor = tensor.transpose([*range(2, tensor.ndim), 1, 0])
            if _ATTENTION in ours and ours in like and like[ours].size == tensor.size:
                tensor = tensor.reshape(like[ours].shape)  # an axis of heads
            found[ours] = tensor
    return found
