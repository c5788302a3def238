"""Defines the paper's backbones (Tables 1 and 2) as settings of one transformer implementation.

Apart from the tiny backbones, each backbone has the sizes of the published model. OpenELM's sizes follow from
layer-wise scaling (Mehta et al., 2024).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Stretch:
    """Scaling of rotary frequencies that extends a trained model to longer texts (Llama 3.1).

    Attributes:
      factor: divisor of the low frequencies.
      low, high: numbers of rotations within `trained` positions. Frequencies with fewer than `low` rotations are
        divided, frequencies with more than `high` rotations do not change, and frequencies between these limits are
        interpolated.
      trained: number of positions before the extension.
    """

    factor: float
    low: float
    high: float
    trained: int


@dataclass(frozen=True)
class Relative:
    """Relative positions whose parameters all attention layers share.

    Attributes:
      kind: "bias": a bias for each head and group of distances (T5, MPNet). "disentangled": an embedding of each group,
        which every layer projects to queries and keys (DeBERTa).
      buckets: number of groups of distances, of earlier and later keys together, if `kind` is "bias". If `kind` is
        "disentangled", there are 2 * `buckets` groups. Each small distance has its own group; larger distances share
        groups.
      farthest: for earlier and for later keys, the last group has all distances of at least `farthest`. It may also
        have smaller distances.
    """

    kind: str
    buckets: int
    farthest: int


@dataclass(frozen=True)
class Backbone:
    """Architecture of a transformer without an output layer.

    Attributes:
      family: key of `perception.families.table.FAMILIES`, the naming scheme of the checkpoint files.
      heads, kv_heads: numbers of query heads and key-value heads of each layer.
      size: head size.
      hidden: feed-forward width of each layer.
      norm: "layer", "layer_scale" (without bias), "rms", or "rms_offset" (scales by 1 + parameter).
      norm_position: "pre" or "post" norm.
      embedding_norm: whether the embeddings are normalized.
      first_norm: whether the first attention layer normalizes its input (pre-norm).
      scaled_embeddings: whether the embeddings are multiplied by the square root of the width.
      learned: number of rows of the table of learned positions; 0 if the model has no such table.
      first_position: row of the first position in this table.
      types: number of token types (BERT's segments).
      theta: base of the rotary frequencies.
      rotated: number of features of a head to which rotary positions are applied.
      stretch: change of the rotary frequencies for long texts; None for no change.
      window: a query attends to positions at a distance below `window`; None for full attention.
      local: for each layer, whether its attention uses `window`; () if all layers use it.
      local_theta: base of the rotary frequencies in layers with the window; None means `theta`.
      relative: relative positions; None if the model has no relative positions.
      biases: three flags: biases of queries, keys and values; of attention outputs; of gated feed-forward layers. Other
        feed-forward layers always have biases.
      gated: whether the feed-forward layers are gated.
      parallel: whether attention and feed-forward read the same normalized input (phi).
      fused: whether one matrix computes queries, keys and values (OpenELM, ModernBERT).
      head_norm: whether queries and keys are normalized (OpenELM).
      dropout: three dropout rates: of sublayer outputs, of embeddings, of attention weights.
      longest: maximum number of positions of the published model.
      tied: whether the published model ties its output layer to the embeddings. A backbone has no output layer.
      scaled_init: whether the initial standard deviations of kernels and token embeddings depend on the model's sizes
        (OpenELM). Otherwise they are 0.02. The standard deviation of other embedding tables is always 0.02.
      targets: names of the layers that get LoRA adapters by default. For the paper's backbones, these are the layers
        that the authors' program adapts.
    """

    family: str
    vocabulary: int
    width: int
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    size: int
    hidden: tuple[int, ...]
    causal: bool = True
    norm: str = "rms"
    epsilon: float = 1e-6
    norm_position: str = "pre"
    embedding_norm: bool = False
    first_norm: bool = True
    scaled_embeddings: bool = False
    learned: int = 0
    first_position: int = 0
    types: int = 0
    theta: float = 10_000.0
    rotated: int = 0
    stretch: Stretch | None = None
    window: int | None = None
    local: tuple[bool, ...] = ()
    local_theta: float | None = None
    relative: Relative | None = None
    biases: tuple[bool, bool, bool] = (False, False, False)
    gated: bool = True
    activation: str = "silu"
    parallel: bool = False
    fused: bool = False
    head_norm: bool = False
    dropout: tuple[float, float, float] = (0.0, 0.0, 0.0)
    longest: int = 2048
    tied: bool = True
    scaled_init: bool = False
    targets: tuple[str, ...] = ("query", "key", "value")

    @property
    def layers(self) -> int:
        return len(self.heads)

    def window_of(self, layer: int) -> int | None:
        return self.window if not self.local or self.local[layer] else None

    def theta_of(self, layer: int) -> float:
        return self.local_theta or self.theta if self.window_of(layer) else self.theta


def bert(layers: int, width: int, hidden: int, heads: int) -> Backbone:
    """BERT: post-norm, bidirectional (Devlin et al., 2019). The paper's arctic-embed models have this architecture."""
    return Backbone(
        "bert",
        30_522,
        width,
        (heads,) * layers,
        (heads,) * layers,
        width // heads,
        (hidden,) * layers,
        causal=False,
        norm="layer",
        epsilon=1e-12,
        norm_position="post",
        embedding_norm=True,
        learned=512,
        types=2,
        biases=(True, True, True),
        gated=False,
        activation="gelu",
        dropout=(0.1, 0.1, 0.1),
        longest=512,
        # No adapters for queries, keys and values: the authors' program adapts the layers named "dense", and these
        # three layers of BERT have other names.
        targets=("out", "up", "down"),
    )


def qwen2(layers: int, width: int, hidden: int, heads: int, kv_heads: int) -> Backbone:
    """Qwen2 (Yang et al., 2024)."""
    size = width // heads
    return Backbone(
        "qwen2",
        151_936,
        width,
        (heads,) * layers,
        (kv_heads,) * layers,
        size,
        (hidden,) * layers,
        theta=1e6,
        rotated=size,
        longest=131_072,
        biases=(True, False, False),
    )


def mistral(layers: int, width: int, hidden: int, heads: int, kv_heads: int) -> Backbone:
    """Mistral (Jiang et al., 2023)."""
    return replace(
        qwen2(layers, width, hidden, heads, kv_heads),
        family="mistral",
        vocabulary=32_000,
        epsilon=1e-5,
        tied=False,
        theta=1e4,
        longest=32_768,
        window=4096,
        biases=(False, False, False),
    )


def phi(layers: int, width: int, hidden: int, heads: int) -> Backbone:
    """phi-2: attention and feed-forward in parallel, and rotary positions on 40 % of each head's features."""
    size = width // heads
    return Backbone(
        "phi",
        51_200,
        width,
        (heads,) * layers,
        (heads,) * layers,
        size,
        (hidden,) * layers,
        norm="layer",
        epsilon=1e-5,
        rotated=int(0.4 * size),
        biases=(True, True, True),
        gated=False,
        activation="gelu_tanh",
        parallel=True,
        dropout=(0.1, 0.0, 0.0),
        tied=False,
        targets=("query", "key", "value", "out"),
    )


def divisible(value: float, divisor: int) -> int:
    """Returns the multiple of `divisor`, positive and at least 0.9 * value, that is nearest to `value`."""
    rounded = max(divisor, int(value + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < 0.9 * value else rounded


def between(first: float, last: float, layers: int) -> list[float]:
    """Returns one number per layer, interpolated linearly from `first` to `last` and rounded to two decimals."""
    step = (last - first) / max(layers - 1, 1)
    return [round(first + i * step, 2) for i in range(layers)]


def openelm(
    layers: int,
    width: int,
    size: int,
    *,
    groups: int = 4,
    attention: Sequence[float] = (),
    feed_forward: Sequence[float] = (),
    divisor: int = 256,
) -> Backbone:
    """OpenELM (Mehta et al., 2024). By default, layer sizes grow linearly, up to rounding, from first to last.

    Args:
      groups: number of query heads for each key-value head.
      attention: total width of the query heads of each layer, as a multiple of the model width; () for 0.5 to 1.
      feed_forward: number of hidden features of each layer, as a multiple of the model width; () for 0.5 to 4.
      divisor: number that divides the number of hidden features.
    """
    heads = tuple(
        divisible(width * scale, size * groups) // size
        for scale in attention or between(0.5, 1.0, layers)
    )
    hidden = tuple(
        divisible(width * scale, divisor) for scale in feed_forward or between(0.5, 4.0, layers)
    )
    return Backbone(
        "openelm",
        32_000,
        width,
        heads,
        tuple(count // groups for count in heads),
        size,
        hidden,
        rotated=size,
        fused=True,
        head_norm=True,
        scaled_init=True,
        targets=("qkv", "out"),
    )


BACKBONES = {
    "qwen2_0.5b": qwen2(24, 896, 4864, 14, 2),
    "qwen2_1.5b": qwen2(28, 1536, 8960, 12, 2),
    "arctic_l": bert(24, 1024, 4096, 16),
    "arctic_m": bert(12, 768, 3072, 12),
    "arctic_s": bert(12, 384, 1536, 12),
    "arctic_xs": bert(6, 384, 1536, 12),
    "openelm_270m": openelm(16, 1280, 64),
    "openelm_450m": openelm(20, 1536, 64),
    "openelm_1.1b": openelm(28, 2048, 64),
    "openelm_3b": openelm(36, 3072, 128),
    "phi_2": phi(32, 2560, 10_240, 32),
    "mistral_7b": mistral(32, 4096, 14_336, 32, 8),
    "tiny_bert": replace(bert(2, 64, 128, 4), vocabulary=1000, learned=128, longest=128),
    "tiny_qwen2": replace(qwen2(2, 64, 128, 4, 2), vocabulary=1000),
    "tiny_openelm": replace(openelm(3, 64, 16, groups=2, divisor=32), vocabulary=1000),
    "tiny_phi": replace(phi(2, 64, 128, 4), vocabulary=1000),
    "tiny_mistral": replace(mistral(2, 64, 128, 4, 2), vocabulary=1000, window=16),
}
"""Name -> backbone: the paper's backbones, and a small backbone of each of their families for quick runs."""
