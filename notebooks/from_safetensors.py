"""Pretrained vision transformers for ``compare``: a ViT or DeiT of timm or Hugging Face.

A file beside this one, such as deit.py, names yours:

    from from_safetensors import pretrained
    from networks import vit_s16

    def small(classes):
        return pretrained("deit_small.safetensors", vit_s16, classes)

    python -m sam_optax compare --preset fsam-transfer --model notebooks/deit.py:small --dataset ...

It needs pip install safetensors. The head starts at random if the number of classes differs.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from safetensors.numpy import load_file

HEAD = 64  # width of an attention head, in ViT-S/16, ViT-B/16 and DeiT
ATTENTION = "MultiHeadDotProductAttention_0"
NAMES = {  # of timm and of Hugging Face: those of vit_s16 and vit_b16
    "cls_token embeddings.cls_token": "token",
    "pos_embed embeddings.position_embeddings": "positions",
    "patch_embed.proj embeddings.patch_embeddings.projection": "Conv_0",
    "norm layernorm": "LayerNorm_0",
    "head classifier": "Dense_0",
    "norm1 layernorm_before": "LayerNorm_0",
    "norm2 layernorm_after": "LayerNorm_1",
    "mlp.fc1 intermediate.dense": "Dense_0",
    "mlp.fc2 output.dense": "Dense_1",
    "attn.query attention.attention.query": f"{ATTENTION}/query",  # timm's after splitting
    "attn.key attention.attention.key": f"{ATTENTION}/key",
    "attn.value attention.attention.value": f"{ATTENTION}/value",
    "attn.proj attention.output.dense": f"{ATTENTION}/out",
}
OURS = {name: ours for names, ours in NAMES.items() for name in names.split()}


def pretrained(
    path: str, network: Callable[[int], Any], classes: int
) -> tuple[Any, dict[str, np.ndarray]]:
    """The network, and the variables from a file that it starts with."""
    found = converted(load_file(path))
    if len(found["params/Dense_0/bias"]) != classes:  # of the pretraining
        del found["params/Dense_0/kernel"], found["params/Dense_0/bias"]
    return network(classes), found


def converted(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The variables by path; tensors of other names are refused."""
    found = {}
    for name, value in tensors.items():
        stem = re.sub(r"^(vit|deit)\.", "", name)
        if stem.startswith("pooler."):  # which classification does not use
            continue
        kind = re.search(r"\.(weight|bias)$", stem)
        stem = re.sub(r"\.(weight|bias)$", "", stem)
        block = re.match(r"(?:blocks|encoder\.layer)\.(\d+)\.(.*)", stem)
        where, stem = (f"Block_{block[1]}/", block[2]) if block else ("", stem)
        parts = {stem: value}
        if stem == "attn.qkv":
            names = ("attn.query", "attn.key", "attn.value")
            parts = dict(zip(names, np.array_split(value, 3), strict=True))
        for part, tensor in parts.items():
            if part not in OURS:
                raise ValueError(f"{name}: not a tensor of a ViT or DeiT")
            path = where + OURS[part]
            if kind:
                scale = "scale" if "LayerNorm" in path else "kernel"
                path += f"/{scale if kind[1] == 'weight' else 'bias'}"
            if kind and tensor.ndim in (2, 4):  # PyTorch's (out, in[, height, width])
                tensor = tensor.transpose([*range(2, tensor.ndim), 1, 0])
            if path.endswith("out/kernel"):
                tensor = tensor.reshape(-1, HEAD, tensor.shape[-1])
            elif ATTENTION in path and "/out/" not in path:
                tensor = tensor.reshape(*tensor.shape[:-1], -1, HEAD)
            found[f"params/{path}"] = tensor
    return found
