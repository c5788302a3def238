"""Byte language models in PyTorch: two public gMLP packages, a GPT, and Hugging Face's GPT-2.

All models have the sizes of our models: width 512, hidden 2048, 4 layers, 768 positions (769 for Hugging Face's GPT-2),
vocabulary of 256 bytes. Only the GPT has exactly as many parameters as our model of its kind.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers.training import make_runner
from common.train.conditions import cores

WIDTH, HIDDEN, LAYERS, LENGTH, HEADS, BYTES = 512, 2048, 4, 768, 8, 256
DROPOUT = 0.1  # dropout rate of the embeddings and of the output of every sublayer


class Block(nn.Module):
    """A pre-norm block of attention and feed-forward, as in GPT-2."""

    def __init__(self):
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.drop = nn.Dropout(DROPOUT)

    def forward(self, x_BLD: Tensor) -> Tensor:
        batch, length, _ = x_BLD.shape
        split = self.qkv(self.before_attention(x_BLD)).view(batch, length, 3, HEADS, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        y_BHLK = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BLD = x_BLD + self.drop(self.out(y_BHLK.transpose(1, 2).flatten(2)))
        return x_BLD + self.drop(self.down(F.gelu(self.up(self.before_mlp(x_BLD)))))


class Gpt(nn.Module):
    """A GPT with learned positions and an output layer tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(BYTES, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(DROPOUT)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        x_BLD = self.tokens(tokens_BL) + self.positions.weight[: tokens_BL.shape[1]]
        return self.norm(self.blocks(self.drop(x_BLD))) @ self.tokens.weight.T


def make_model(name: str) -> nn.Module:
    """Returns the model `name`: "gpt", "g-mlp-pytorch" or "g-mlp-gpt"."""
    sizes = {"num_tokens": BYTES, "dim": WIDTH, "depth": LAYERS, "ff_mult": HIDDEN // WIDTH}
    match name:
        case "gpt":
            return Gpt()
        case "g-mlp-pytorch":
            from g_mlp_pytorch import gMLP, gMLPBlock

            model = gMLP(seq_len=LENGTH, causal=True, **sizes)
            # g_mlp_pytorch has no dropout. Add dropout after the embeddings and after each block.
            for module in model.modules():
                if isinstance(module, nn.Embedding | gMLPBlock):
                    module.register_forward_hook(lambda m, _, y: F.dropout(y, DROPOUT, m.training))
            return model
        case "g-mlp-gpt":
            from g_mlp_gpt import gMLPGPT

            return gMLPGPT(seq_len=LENGTH, window=(LENGTH,) * LAYERS, **sizes)


def make_step(
    name: str, dtype: str, batch: int, *, device: str = "cpu", **options
) -> Callable[[], float]:
    """Returns a function that runs a training step (forward, loss, backward, Adam) and returns the loss.

    `options` are `compiled` and `steps` of `make_runner`.
    """
    torch.set_num_threads(cores())
    torch.manual_seed(0)
    model = make_model(name).train().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4, fused=True)
    text = torch.randint(0, BYTES, (batch, LENGTH + 1)).to(device)

    def loss(text: Tensor) -> Tensor:
        logits = model(text[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())

    return make_runner(loss, [text], optimizer, dtype, device=device, **options)


def make_writer(name: str, start: int, count: int) -> Callable[[], None]:
    """Returns a function that generates `count` bytes after a prompt of `start` bytes.

    Args:
      name: "hugging face gpt-2", which uses a KV cache, or a model of `make_model`, which computes the whole text again
        for each byte.
    """
    torch.set_num_threads(cores())
    prompt = torch.randint(0, BYTES, (1, start))
    if name == "hugging face gpt-2":
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_inner": HIDDEN}
        config = GPT2Config(vocab_size=BYTES, n_positions=LENGTH + 1, **sizes)
        model = GPT2LMHeadModel(config).eval()
        options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        options |= {"max_new_tokens": count, "min_new_tokens": count}

        @torch.inference_mode()
        def generate() -> None:
            model.generate(prompt, **options)

        return generate
    model = make_model(name).eval()

    @torch.inference_mode()
    def recompute() -> None:
        text = prompt
        for _ in range(count):
            best = model(text)[:, -1].argmax(-1, keepdim=True)
            text = torch.cat([text, best], 1)

    return recompute
