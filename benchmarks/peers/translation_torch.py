"""A PyTorch pre-norm translation transformer with 8 encoder and 2 decoder layers.

A layer has the sizes of fairseq's transformer_iwslt_de_en, which has 6 encoder and 6 decoder layers.

Of the eager variants that we tried on a CPU, these were the fastest: one product for q, k and v instead of three;
`F.cross_entropy` instead of a hand-written loss; fused Adam instead of foreach or a loop over parameters. Unlike
fairseq, nn.TransformerEncoderLayer has dropout inside attention and feed-forward, so this model has its own layers.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers.training import make_runner
from common.train.conditions import cores

WIDTH, FFN_WIDTH, HEADS, VOCABULARY = 512, 1024, 4, 10_000
ENCODER_LAYERS, DECODER_LAYERS, LENGTH = 8, 2, 32
RESERVOIRS = (2, 4)  # indices of the frozen encoder layers, from 0
SMOOTHING = 0.1


def attend(q_BHLK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, causal: bool) -> Tensor:
    # For 32 tokens on CPUs, PyTorch's fused attention is faster in float32, and attention as two matrix products is
    # faster in bfloat16.
    if q_BHLK.dtype == torch.float32 or q_BHLK.is_cuda:
        return F.scaled_dot_product_attention(q_BHLK, k_BHSK, v_BHSK, is_causal=causal)
    scores_BHLS = q_BHLK * q_BHLK.shape[-1] ** -0.5 @ k_BHSK.mT
    if causal:
        future_LS = torch.ones(scores_BHLS.shape[-2:], dtype=torch.bool).triu(1)
        scores_BHLS = scores_BHLS.masked_fill(future_LS, float("-inf"))
    return scores_BHLS.softmax(-1) @ v_BHSK


def split_heads(x: Tensor, parts: int) -> tuple[Tensor, ...]:
    """Splits (B, L, parts * D) into `parts` tensors (B, H, L, D / H)."""
    batch, length, _ = x.shape
    return x.view(batch, length, parts, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)


def merge_heads(x_BHLK: Tensor) -> Tensor:
    return x_BHLK.transpose(1, 2).flatten(2)


class SelfAttention(nn.Module):
    def __init__(self, causal: bool):
        super().__init__()
        self.causal = causal
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.out(merge_heads(attend(*split_heads(self.qkv(x_BLD), 3), self.causal)))


class CrossAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BLD: Tensor, encoded_BSD: Tensor) -> Tensor:
        (q,) = split_heads(self.q(x_BLD), 1)
        return self.out(merge_heads(attend(q, *split_heads(self.kv(encoded_BSD), 2), causal=False)))


class FeedForward(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(WIDTH, FFN_WIDTH), nn.ReLU(), nn.Linear(FFN_WIDTH, WIDTH))


class Residual(nn.Module):
    """A pre-norm sublayer, x + dropout(inner(norm(x))), as in fairseq."""

    def __init__(self, inner: nn.Module, dropout: float):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = inner
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BLD: Tensor, *context: Tensor) -> Tensor:
        return x_BLD + self.dropout(self.inner(self.norm(x_BLD), *context))


class DecoderLayer(nn.Module):
    def __init__(self, dropout: float):
        super().__init__()
        self.self_attention = Residual(SelfAttention(causal=True), dropout)
        self.cross_attention = Residual(CrossAttention(), dropout)
        self.feed_forward = Residual(FeedForward(), dropout)

    def forward(self, x_BLD: Tensor, encoded_BSD: Tensor) -> Tensor:
        return self.feed_forward(self.cross_attention(self.self_attention(x_BLD), encoded_BSD))


class Embedding(nn.Module):
    """Token embedding times sqrt(D), plus sinusoids (sines, then cosines), then dropout."""

    def __init__(self, dropout: float):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.tokens.weight, std=WIDTH**-0.5)
        half = WIDTH // 2
        rates = 10_000.0 ** (-torch.arange(half) / (half - 1))
        angles = torch.arange(LENGTH)[:, None] * rates
        self.register_buffer("positions", torch.cat([angles.sin(), angles.cos()], dim=1))
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids_BL: Tensor) -> Tensor:
        return self.dropout(self.tokens(ids_BL) * WIDTH**0.5 + self.positions)


class Translator(nn.Module):
    """Encoder and decoder; the output projection is tied to the decoder's embedding."""

    def __init__(self, reservoirs: bool, dropout: float):
        super().__init__()
        self.source, self.target = Embedding(dropout), Embedding(dropout)
        self.encoder = nn.ModuleList()
        for index in range(ENCODER_LAYERS):
            reservoir = reservoirs and index in RESERVOIRS
            layer = nn.Sequential(Residual(FeedForward(), dropout))
            if not reservoir:
                layer.insert(0, Residual(SelfAttention(causal=False), dropout))
            self.encoder.append(layer.requires_grad_(not reservoir))
        self.encoder_norm = nn.LayerNorm(WIDTH)
        self.decoder = nn.ModuleList(DecoderLayer(dropout) for _ in range(DECODER_LAYERS))
        self.decoder_norm = nn.LayerNorm(WIDTH)

    def forward(self, source_BL: Tensor, target_BL: Tensor) -> Tensor:
        encoded_BSD = self.source(source_BL)
        for layer in self.encoder:
            encoded_BSD = layer(encoded_BSD)
        encoded_BSD = self.encoder_norm(encoded_BSD)
        x_BLD = self.target(target_BL)
        for layer in self.decoder:
            x_BLD = layer(x_BLD, encoded_BSD)
        return F.linear(self.decoder_norm(x_BLD), self.target.tokens.weight)


def smoothed_loss(logits_BLV: Tensor, labels_BL: Tensor) -> Tensor:
    """Returns fairseq's label-smoothed loss, as the mean over tokens.

    fairseq spreads the smoothing over the V - 1 wrong tokens, `F.cross_entropy` over all V tokens. Multiplying the
    smoothing by V / (V - 1) makes the two losses equal.
    """
    scaled = SMOOTHING * VOCABULARY / (VOCABULARY - 1)
    return F.cross_entropy(logits_BLV.flatten(0, 1), labels_BL.flatten(), label_smoothing=scaled)


def make_step(
    reservoirs: bool,
    dtype: str,
    dropout: float,
    batch: int = 64,
    *,
    device: str = "cpu",
    **options,
) -> Callable[[], float]:
    """Returns a function that runs a training step on a random batch without padding and returns the loss.

    Args:
      reservoirs: whether the encoder layers RESERVOIRS are FFN reservoirs: frozen, without attention, and not passed to
        the optimizer.
      dtype: "float32", or "bfloat16" for autocast with float32 parameters.
      dropout: dropout rate after the embeddings, every attention and every feed-forward.
      options: `compiled` and `steps` of `make_runner`.
    """
    torch.set_num_threads(cores())
    torch.manual_seed(0)
    model = Translator(reservoirs, dropout).train().to(device)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trainable, lr=5e-4, betas=(0.9, 0.98), fused=True)
    tokens_3BL = torch.randint(VOCABULARY, (3, batch, LENGTH)).to(device)

    def loss(source_BL: Tensor, inputs_BL: Tensor, labels_BL: Tensor) -> Tensor:
        return smoothed_loss(model(source_BL, inputs_BL), labels_BL)

    return make_runner(loss, tokens_3BL.unbind(), optimizer, dtype, device=device, **options)
