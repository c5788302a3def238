"""Low-rank adapters (LoRA; Hu et al., 2021) of linear layers."""

from collections.abc import Collection
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from common.freezing import freeze_loaded
from common.model import initializers
from common.model.dropout import Key, dropout
from common.model.linear import Linear, matmul
from common.model.stored import PRODUCT, stored


@dataclass(frozen=True)
class Lora:
    """Settings of adapters.

    Attributes:
      rank: rank R.
      alpha: adapters are scaled by alpha / R, or by alpha / sqrt(R) if `stabilized` (rsLoRA; Kalajdzievski, 2023).
      rate: dropout rate of an adapter's input.
    """

    rank: int = 32
    alpha: float = 32.0
    rate: float = 0.05
    stabilized: bool = False

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.stabilized else self.rank)


class LoraLinear(Linear):
    """A linear layer with an adapter: x W + b + scale * dropout(x) A B.

    Kernel and bias have the same names as in `Linear`, so that checkpoints of `Linear` can be loaded.
    """

    def __init__(self, linear: Linear, lora: Lora, *, rngs: nnx.Rngs):
        self.kernel, self.bias = linear.kernel, linear.bias
        (inputs, outputs), (from_, to) = self.kernel.shape, self.kernel.get_metadata("axes")
        # Initialised as in peft: A by Kaiming's uniform with a = sqrt(5), B = 0.
        draw = initializers.uniform(inputs**-0.5)
        self.lora_a = nnx.Param(draw(rngs.params(), (inputs, lora.rank)), axes=(from_, None))
        zeros = initializers.zeros(rngs.params(), (lora.rank, outputs))
        self.lora_b = nnx.Param(zeros, axes=(None, to))
        self.lora = lora

    def __call__(
        self, x_BLM: jax.Array, dtype: jnp.dtype | None = None, key: Key = None
    ) -> jax.Array:
        dtype = dtype or x_BLM.dtype
        a_BLR = matmul(dropout(x_BLM, self.lora.rate, key), self.lora_a[...])
        a_BLR = stored(a_BLR.astype(x_BLM.dtype), PRODUCT)
        adapted_BLN = self.lora.scale * matmul(a_BLR, self.lora_b[...])
        y_BLN = super().__call__(x_BLM, jnp.float32) + adapted_BLN
        return stored(y_BLN.astype(dtype), PRODUCT)

    def merged(self) -> jax.Array:
        """Returns the kernel (M, N) with the adapter merged into it."""
        return self.kernel[...] + self.lora.scale * self.lora_a[...] @ self.lora_b[...]


def linear_layers(model: nnx.Module) -> dict[tuple[str, ...], nnx.Module]:
    """Returns {path of each linear layer: module that contains the layer}."""
    return {
        (*map(str, path), name): parent
        for path, parent in nnx.iter_modules(model)
        for name, part in vars(parent).items()
        if isinstance(part, Linear)
    }


def is_target(path: tuple[str, ...], target: str) -> bool:
    """Returns whether a path ends with the names of a target, such as "query" or "function/down"."""
    names = tuple(target.split("/"))
    return path[-len(names) :] == names


def adapt(model: nnx.Module, targets: Collection[str], lora: Lora, *, rngs: nnx.Rngs) -> None:
    """Freezes all parameters (`freeze_loaded`), and adds a trainable adapter to each target (`is_target`)."""
    freeze_loaded(model)
    for path, parent in linear_layers(model).items():
        if any(is_target(path, target) for target in targets):
            setattr(parent, path[-1], LoraLinear(getattr(parent, path[-1]), lora, rngs=rngs))
