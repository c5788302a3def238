"""Maps our parameter names to tensors in Hugging Face files, with transposition and fused layers.

Kernels are (inputs, outputs) here and (outputs, inputs) in the files.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from perception.safetensor_files import TensorFiles


@dataclass(frozen=True)
class Names:
    """Parameter names of a family.

    Attributes:
      prefix: prefix of all names in files that include an output layer.
      layers: name of the list of layers.
      outside: our module -> their module, outside of the layers.
      inside: our module -> their module, relative to a layer.
    """

    prefix: str
    layers: str
    outside: Mapping[str, str]
    inside: Mapping[str, str]


_ATTENTION, _FORWARD = "residuals/0/function/", "residuals/1/function/"
_QKV = {
    f"{_ATTENTION}{ours}": f"self_attn.{theirs}"
    for ours, theirs in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"))
}
_BERT = Names(
    "bert.",
    "encoder.layer",
    {
        "embed": "embeddings.word_embeddings",
        "embed/positions": "embeddings.position_embeddings",
        "embed/types": "embeddings.token_type_embeddings",
        "norm": "embeddings.LayerNorm",
    },
    {
        f"{_ATTENTION}query": "attention.self.query",
        f"{_ATTENTION}key": "attention.self.key",
        f"{_ATTENTION}value": "attention.self.value",
        f"{_ATTENTION}out": "attention.output.dense",
        "residuals/0/norm": "attention.output.LayerNorm",
        f"{_FORWARD}up": "intermediate.dense",
        f"{_FORWARD}down": "output.dense",
        "residuals/1/norm": "output.LayerNorm",
    },
)
_LLAMA = Names(
    "model.",
    "layers",
    {"embed": "embed_tokens", "stack/norm": "norm"},
    {
        **_QKV,
        f"{_ATTENTION}out": "self_attn.o_proj",
        "residuals/0/norm": "input_layernorm",
        f"{_FORWARD}gate": "mlp.gate_proj",
        f"{_FORWARD}up": "mlp.up_proj",
        f"{_FORWARD}down": "mlp.down_proj",
        "residuals/1/norm": "post_attention_layernorm",
    },
)
_PHI = Names(
    "model.",
    "layers",
    {"embed": "embed_tokens", "stack/norm": "final_layernorm"},
    {
        **{f"{_ATTENTION}functions/0/{ours.rpartition('/')[2]}": t for ours, t in _QKV.items()},
        f"{_ATTENTION}functions/0/out": "self_attn.dense",
        f"{_ATTENTION}functions/1/up": "mlp.fc1",
        f"{_ATTENTION}functions/1/down": "mlp.fc2",
        "residuals/0/norm": "input_layernorm",
    },
)
_OPENELM = Names(
    "transformer.",
    "layers",
    {"embed": "token_embeddings", "stack/norm": "norm"},
    {
        f"{_ATTENTION}qkv": "attn.qkv_proj",
        f"{_ATTENTION}query_norm": "attn.q_norm",
        f"{_ATTENTION}key_norm": "attn.k_norm",
        f"{_ATTENTION}out": "attn.out_proj",
        "residuals/0/norm": "attn_norm",
        f"{_FORWARD}gate": "ffn.proj_1",  # the first half of its outputs
        f"{_FORWARD}up": "ffn.proj_1",  # the second half
        f"{_FORWARD}down": "ffn.proj_2",
        "residuals/1/norm": "ffn_norm",
    },
)
NAMES = {"bert": _BERT, "qwen2": _LLAMA, "mistral": _LLAMA, "phi": _PHI, "openelm": _OPENELM}

_LEAVES = {"kernel": "weight", "bias": "bias", "scale": "weight", "table": "weight"}
OLD = {"weight": "gamma", "bias": "beta"}
"""Names of norm parameters in early BERT files."""


def their_name(family: str, ours: str) -> str:
    """Maps "stack/blocks/0/residuals/0/function/query/kernel" to "layers.0.self_attn.q_proj.weight"."""
    names = NAMES[family]
    module, _, leaf = ours.rpartition("/")
    if ours in names.outside:  # an embedding table that is not in a module
        module, leaf = ours, "table"
    layer = re.fullmatch(r"stack/blocks/(\d+)/(.*)", module)
    where = (
        f"{names.layers}.{layer[1]}.{names.inside[layer[2]]}" if layer else names.outside[module]
    )
    return f"{where}.{_LEAVES[leaf]}"


@dataclass(frozen=True)
class Location:
    """Location of a parameter in the files.

    Attributes:
      name: name of the stored tensor.
      stored: shape of the stored tensor.
      start: first output of our layer in a tensor that fuses two layers; otherwise 0.
      transposed: whether the stored tensor is transposed.
    """

    name: str
    stored: tuple[int, ...]
    start: int
    transposed: bool

    def read(
        self, files: TensorFiles, index: tuple[slice, ...], shape: tuple[int, ...]
    ) -> np.ndarray:
        """Reads the slice `index` of our array, whose full shape is `shape`."""
        bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
        if self.transposed:
            (first, last), inputs = bounds[1], bounds[0]
            bounds = [(self.start + first, self.start + last), inputs]
        part = files.read(self.name, tuple(slice(*ends) for ends in bounds))
        return part.T if self.transposed else part


def locate(family: str, ours: str, shape: tuple[int, ...]) -> Location:
    """Returns the location of our parameter `ours`, which has this shape."""
    name, transposed = their_name(family, ours), ours.endswith("/kernel")
    stored = shape[::-1] if transposed else shape
    start = 0
    if family == "openelm" and ".proj_1." in name:
        start = shape[1] if "/up/" in ours else 0
        stored = (2 * stored[0], stored[1])
    return Location(name, stored, start, transposed)
