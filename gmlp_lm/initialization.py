"""How the models start: as GPT-2 does, or as PyTorch's layers do, which the paper's code keeps."""

from flax import nnx

from common.model import initializers
from common.model.language_model import LanguageModel
from common.model.linear import Linear


def as_gpt2(made: LanguageModel, rngs: nnx.Rngs) -> None:
    """N(0, 0.02), biases 0, and what is added to the residual stream smaller by the square root of its summands."""
    draw = initializers.normal(0.02)
    for _, part in nnx.iter_modules(made):
        if isinstance(part, Linear):
            part.kernel[...] = draw(rngs.params(), part.kernel.shape)
    for part in (made.embed, made.embed.positions):
        if hasattr(part, "table"):
            part.table[...] = draw(rngs.params(), part.table.shape)
    summands = sum(len(block.residuals) for block in made.stack.blocks)
    for block in made.stack.blocks:
        for residual in block.residuals:
            function = residual.function
            last = function.down if hasattr(function, "down") else function.out
            last.kernel[...] = last.kernel[...] * summands**-0.5


def as_torch(made: LanguageModel, rngs: nnx.Rngs) -> None:
    """PyTorch's defaults, which the paper's code keeps: U(-1/sqrt(D), 1/sqrt(D)) for D inputs, tables N(0, 1)."""
    for _, part in nnx.iter_modules(made):
        if isinstance(part, Linear):
            draw = initializers.uniform(part.kernel.shape[0] ** -0.5)
            part.kernel[...] = draw(rngs.params(), part.kernel.shape)
            if part.bias is not None:
                part.bias[...] = draw(rngs.params(), part.bias.shape)
    table = made.embed.table
    table[...] = initializers.normal(1.0)(rngs.params(), table.shape)


INITIALIZATIONS = {"gpt2": as_gpt2, "torch": as_torch}
