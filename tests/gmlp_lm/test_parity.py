"""Our models and public PyTorch models with the same weights compute equal logits.

make_golden.py wrote the weights and logits of the PyTorch models to golden.npz.
"""

import re
from pathlib import Path

import numpy as np
import pytest

from common import variables
from configs import language
from gmlp_lm.model import language_model

GOLDEN = Path(__file__).with_name("golden.npz")
CASES = {
    "full": {"windows": ()},
    "windows": {"windows": (4, 12)},
    "attention": {"windows": (4, 12), "attention": 2},
    "heads": {"gate_heads": 2},
    "wide_attention": {"attention": 4},
    "gpt2": {"kind": "gpt", "heads": 2, "positions": "learned", "tied": True},
}

# Path of a PyTorch module -> path of our layer, or of our array for an embedding table. Both paths lack the prefix of a
# block, such as transformer.h.0. and stack/blocks/0/.
NAMES = {
    "to_embed": "embed/table",
    "to_logits.0": "stack/norm",
    "to_logits.1": "output",
    "transformer.wte": "embed/table",
    "transformer.wpe": "embed/positions/table",
    "transformer.ln_f": "stack/norm",
    "norm": "residuals/0/norm",
    "fn.norm": "residuals/0/norm",
    "proj_in.0": "residuals/0/function/up",
    "proj_out": "residuals/0/function/down",
    "sgu.norm": "residuals/0/function/norm",
    "sgu": "residuals/0/function/spatial",
    "attn.to_out": "residuals/0/function/attention/out",
    "ln_1": "residuals/0/norm",
    "ln_2": "residuals/1/norm",
    "attn.c_proj": "residuals/0/function/out",
    "mlp.c_fc": "residuals/1/function/up",
    "mlp.c_proj": "residuals/1/function/down",
}


def ours(there: str, value: np.ndarray) -> dict[str, np.ndarray]:
    """Converts a PyTorch parameter, named `there`, to {name: value} of our parameters.

    A fused matrix of queries, keys and values gives three parameters.
    """
    path, _, kind = there.rpartition(".")
    match = re.match(r"(?:net\.layers\.(\d)\.0|layers\.(\d)|transformer\.h\.(\d))\.(.*)", path)
    block = ""
    if match:
        number = next(group for group in match.groups()[:3] if group)
        block, path = (
            f"stack/blocks/{number}/",
            match[4].replace("fn.fn.fn.", "").replace("fn.fn.", ""),
        )
    if path in ("attn.to_qkv", "attn.c_attn"):
        gpt = path == "attn.c_attn"
        place = f"{block}residuals/0/function/" + ("" if gpt else "attention/")
        parts = np.split(value if gpt else value.T, 3, axis=-1)
        leaf = "kernel" if kind == "weight" else "bias"
        return {
            f"{place}{n}/{leaf}": p for n, p in zip(("query", "key", "value"), parts, strict=True)
        }
    name = block + NAMES[path]
    if name.endswith("table"):
        return {name: value}
    if kind == "bias" or name.endswith("spatial"):
        return {f"{name}/{kind}": value}
    if name.endswith("norm"):
        return {f"{name}/scale": value}
    # Kernels are (inputs, outputs) in our models and in Hugging Face's GPT-2, but (outputs, inputs) in nn.Linear.
    return {f"{name}/kernel": value if "transformer.h" in there else value.T}


@pytest.mark.parametrize("case", CASES)
def test_logits_match_the_public_packages(case):
    with np.load(GOLDEN) as file:
        arrays = {n.partition("/")[2]: file[n] for n in file.files if n.startswith(f"{case}/")}
    tokens, logits = arrays.pop("tokens").astype(np.int32), arrays.pop("logits")
    arrays.pop("lm_head.weight", None)  # tied to the embedding table
    model = language.code("gmlp", "enwik8").model
    model.update({"width": 8, "hidden": 16, "layers": 2, "length": 12, "dtype": "float32"})
    model.windows = ()
    model.update(CASES[case])
    abstract_model = variables.abstract(lambda rngs: language_model(model, 11, rngs=rngs))
    values = {}
    for name, value in arrays.items():
        values |= ours(name, value)
    assert {n: v.shape for n, v in values.items()} == {
        n: v.shape for n, v in abstract_model.trainable.items()
    }
    found = abstract_model.build(values, {})(tokens)
    np.testing.assert_allclose(found, logits, rtol=1e-4, atol=1e-4)
