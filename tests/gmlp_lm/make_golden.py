"""Writes golden.npz: tokens, random weights and logits of public PyTorch models, for test_parity.py.

    pip install -r benchmarks/requirements.txt && python tests/gmlp_lm/make_golden.py

Run this program only to add a case.
"""

from pathlib import Path

import numpy as np
import torch
from g_mlp_gpt import gMLPGPT
from g_mlp_pytorch import gMLP
from transformers import GPT2Config, GPT2LMHeadModel

TOKENS, WIDTH, LENGTH = 11, 8, 12


def cases() -> dict[str, torch.nn.Module]:
    sizes = {"num_tokens": TOKENS, "dim": WIDTH, "depth": 2, "seq_len": LENGTH, "ff_mult": 2}
    gpt2 = GPT2Config(
        vocab_size=TOKENS, n_positions=LENGTH, n_embd=WIDTH, n_layer=2, n_head=2, n_inner=16
    )
    gpt2.activation_function = "gelu"
    return {
        "full": gMLPGPT(**sizes, window=(LENGTH, LENGTH)),
        "windows": gMLPGPT(**sizes, window=(4, LENGTH)),
        "attention": gMLPGPT(**sizes, window=(4, LENGTH), attn_dim=2),
        "heads": gMLP(**sizes, causal=True, heads=2),
        "wide_attention": gMLP(**sizes, causal=True, attn_dim=4),
        "gpt2": GPT2LMHeadModel(gpt2),
    }


def main() -> None:
    torch.manual_seed(0)
    arrays = {}
    for name, model in cases().items():
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 0, 0.5)
        tokens = torch.randint(0, TOKENS, (2, LENGTH))
        with torch.inference_mode():
            logits = model.eval()(tokens)
        arrays[f"{name}/tokens"] = tokens.numpy().astype(np.uint8)
        arrays[f"{name}/logits"] = getattr(logits, "logits", logits).numpy()
        for key, value in model.state_dict().items():
            if value.dtype == torch.float32:
                arrays[f"{name}/{key}"] = value.numpy()
    np.savez_compressed(Path(__file__).with_name("golden.npz"), **arrays)


if __name__ == "__main__":
    main()
