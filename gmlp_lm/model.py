"""The paper's language models: GPT, gMLP, gMLP with a tiny attention, and the "GPT_base" of the authors' program,
whose layers have a tiny attention, but neither a gMLP nor a feed-forward sublayer.

The models have one of two initializations: GPT-2's, or PyTorch's default, which the authors' program uses.
"""

from collections.abc import Callable
from functools import partial

from flax import nnx
from ml_collections import ConfigDict

from common.config import check_choice, check_least, check_rate
from common.errors import check
from common.model import initializers, transformer
from common.model.block import Block, Sublayer
from common.model.embed import Embed
from common.model.gated_mlp import GatedMlp
from common.model.language_model import LanguageModel
from common.model.linear import Linear
from common.model.spatial import Spatial
from common.model.stack import REMAT


def window_of(model: ConfigDict, layer: int) -> int:
    """Returns the window length of a layer in positions; 0 if the layer reads the whole sequence."""
    window = model.windows[layer] if model.windows else 0
    return window if window < model.length else 0


def spatial(model: ConfigDict, layer: int, *, rngs: nnx.Rngs) -> Spatial:
    """Returns the map over positions in one layer's gate."""
    options = {"rngs": rngs, "heads": model.gate_heads, "epsilon": model.epsilon}
    if window := window_of(model, layer):
        from gmlp_lm.maps import BlockLocal

        return BlockLocal(model.length, window, **options)
    if model.spatial == "toeplitz":
        from gmlp_lm.maps import Toeplitz

        return Toeplitz(model.length, **options)
    return Spatial(model.length, **options)


def sublayers(model: ConfigDict, layer: int, *, rngs: nnx.Rngs) -> list[Sublayer]:
    match model.kind:
        case "gpt":
            from common.model.attention import Attention

            mixer = Attention(model.width, model.heads, rngs=rngs, causal=True)
            return [mixer, transformer.feed_forward(model, rngs=rngs)]
        case "gmlp":
            return [
                GatedMlp(
                    model.width,
                    model.hidden,
                    spatial(model, layer, rngs=rngs),
                    rngs=rngs,
                    activation=model.activation,
                    attention=_tiny_attention(model, layer, rngs) if model.attention else None,
                )
            ]
        case _:
            from gmlp_lm.tiny_attention import AttentionAlone

            attention = _tiny_attention(model, layer, rngs)()
            return [AttentionAlone(attention, model.hidden // 2, model.width, rngs=rngs)]


def _tiny_attention(model: ConfigDict, layer: int, rngs: nnx.Rngs) -> Callable[[], Sublayer]:
    from gmlp_lm.tiny_attention import TinyAttention

    return partial(
        TinyAttention,
        model.width,
        model.attention,
        model.hidden // 2,
        rngs=rngs,
        window=window_of(model, layer),
        keys_as_values=model.keys_as_values,
    )


def as_gpt2(made: LanguageModel, rngs: nnx.Rngs) -> None:
    """Draws the kernels of linear layers, and the tables of token and position embeddings, from N(0, 0.02²).

    Divides the output kernel of each sublayer by sqrt(number of sublayers in the model). Other parameters keep their
    values.
    """
    draw = initializers.normal(0.02)
    for _, part in nnx.iter_modules(made):
        if isinstance(part, Linear):
            part.kernel[...] = draw(rngs.params(), part.kernel.shape)
    for part in (made.embed, made.embed.positions):
        if hasattr(part, "table"):
            part.table[...] = draw(rngs.params(), part.table.shape)
    functions = [r.function for block in made.stack.blocks for r in block.residuals]
    for function in functions:
        last = function.down if hasattr(function, "down") else function.out
        last.kernel[...] = last.kernel[...] * len(functions) ** -0.5


def as_torch(made: LanguageModel, rngs: nnx.Rngs) -> None:
    """Draws parameters as PyTorch does by default.

    Draws kernels and biases of linear layers with M inputs from U(-1/sqrt(M), 1/sqrt(M)), and the table of token
    embeddings from N(0, 1). Other parameters keep their values.
    """
    for _, part in nnx.iter_modules(made):
        if isinstance(part, Linear):
            draw = initializers.uniform(part.kernel.shape[0] ** -0.5)
            part.kernel[...] = draw(rngs.params(), part.kernel.shape)
            if part.bias is not None:
                part.bias[...] = draw(rngs.params(), part.bias.shape)
    table = made.embed.table
    table[...] = initializers.normal(1.0)(rngs.params(), table.shape)


INITIALIZATIONS = {"gpt2": as_gpt2, "torch": as_torch}


def language_model(model: ConfigDict, vocabulary: int, *, rngs: nnx.Rngs) -> LanguageModel:
    """Returns the initialized model of `config.model`. `vocabulary` is the number of token ids."""
    blocks: list[Block] = [
        transformer.make_block(model, sublayers(model, layer, rngs=rngs), rngs=rngs)
        for layer in range(model.layers)
    ]
    embed = Embed(
        vocabulary,
        model.width,
        rngs=rngs,
        positions=model.positions,
        maximum=model.length,
        scale=False,
        dropout_rate=model.dropout,
        pad=None,
    )
    axes = ("embed", "vocab")
    made = LanguageModel(
        embed,
        transformer.stack(model, blocks, rngs=rngs),
        None if model.tied else Linear(model.width, vocabulary, axes, rngs=rngs),
        dtype=transformer.compute_dtype(model.dtype),
    )
    INITIALIZATIONS[model.init](made, rngs)
    return made


def validate(model: ConfigDict) -> None:
    """Raises a UserError for an invalid `config.model`. `language_modelling.validate` checks the field `dtype`."""
    check_choice("--config.model.kind", model.kind, ("gpt", "gmlp", "tiny_attention"))
    check_choice("--config.model.spatial", model.spatial, ("full", "toeplitz"))
    check_choice("--config.model.init", model.init, INITIALIZATIONS)
    check_choice("--config.model.positions", model.positions, ("sinusoidal", "learned", "none"))
    check_choice("--config.model.norm", model.norm, ("pre", "post"))
    check_choice("--config.model.remat", model.remat, REMAT)
    check_choice("--config.model.activation", model.activation, ("relu", "gelu", "silu"))
    sizes = ("layers", "width", "hidden", "heads", "gate_heads", "length")
    check_least({"model": model}, [f"model.{name}" for name in sizes])
    check_least({"model": model}, ("model.attention", "model.epsilon"), 0)
    check_rate("--config.model.dropout", model.dropout)
    check(
        model.kind != "gpt" or model.width % model.heads == 0,
        f"--config.model.width={model.width} must be a multiple of --config.model.heads={model.heads}",
    )
    check(
        model.width % 2 == 0 or model.positions != "sinusoidal",
        f"--config.model.width={model.width} must be even for --config.model.positions=sinusoidal",
    )
    check(
        model.kind != "tiny_attention" or model.attention >= 1,
        "--config.model.attention (width of the head) must be at least 1 for --config.model.kind=tiny_attention, got"
        f" {model.attention}",
    )
    check(
        model.kind == "gpt" or model.hidden % (2 * model.gate_heads) == 0,
        f"--config.model.hidden={model.hidden} must be a multiple of {2 * model.gate_heads}, which is twice"
        f" --config.model.gate_heads={model.gate_heads}",
    )
    windows = f"--config.model.windows={','.join(map(str, model.windows))}"
    check(
        model.kind != "gpt" or not model.windows,
        f"{windows} is for the kinds gmlp and tiny_attention: set --config.model.windows= (empty) for"
        " --config.model.kind=gpt",
    )
    check(
        not model.windows or len(model.windows) == model.layers,
        f"{windows} must have one window length for each layer (--config.model.layers={model.layers}), got"
        f" {len(model.windows)}",
    )
    check(
        all(isinstance(window, int) and window >= 1 for window in model.windows),
        f"{windows}: all lengths must be whole numbers of at least 1",
    )
