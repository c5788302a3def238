"""Two initializations: that of GPT-2, and PyTorch's default, which the authors' program uses."""

from flax import nnx

from common.model import initializers
from common.model.language_model import LanguageModel
from common.model.linear import Linear


def as_gpt2(made: LanguageModel, rngs: nnx.Rngs) -> None:
    """Draws the kernels of linear layers and the embedding tables from N(0, 0.02²).

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
    sublayers = sum(len(block.residuals) for block in made.stack.blocks)
    for block in made.stack.blocks:
        for residual in block.residuals:
            function = residual.function
            last = function.down if hasattr(function, "down") else function.out
            last.kernel[...] = last.kernel[...] * sublayers**-0.5


def as_torch(made: LanguageModel, rngs: nnx.Rngs) -> None:
    """Initialises like PyTorch: kernels and biases of a linear layer with M inputs from U(-1/sqrt(M), 1/sqrt(M)).

    Draws the embedding table from N(0, 1). Other parameters keep their values.
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
