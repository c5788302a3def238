"""Low-rank adapters (LoRA; Hu et al., 2021) of the linear layers of any model.

B batch, L length, D inputs, F outputs, R rank.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from common.model import initializers
from common.model.dropout import dropout
from common.model.linear import Linear, matmul
from common.variables import freeze_given


@dataclass(frozen=True)
class Lora:
    """What adapters are like.

    Attributes:
      rank: R.
      alpha: the adapter is scaled by alpha / R; where `stabilized`, by alpha / sqrt(R) (rsLoRA; Kalajdzievski, 2023).
      rate: of dropout of what enters it.
    """

    rank: int = 32
    alpha: float = 32.0
    rate: float = 0.05
    stabilized: bool = False

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.stabilized else self.rank)


class LoraLinear(Linear):
    """x W + b + scale * dropout(x) A B. Kernel and bias keep their names, so a checkpoint of the plain layer fits."""

    def __init__(self, linear: Linear, lora: Lora, *, rngs: nnx.Rngs):
        self.kernel, self.bias = linear.kernel, linear.bias
        (inputs, outputs), (from_, to) = self.kernel.shape, self.kernel.get_metadata("axes")
        # As peft starts them: Kaiming's uniform with a = sqrt(5), and 0.
        draw = initializers.uniform(inputs**-0.5)
        self.lora_a = nnx.Param(draw(rngs.params(), (inputs, lora.rank)), axes=(from_, None))
        zeros = initializers.zeros(rngs.params(), (lora.rank, outputs))
        self.lora_b = nnx.Param(zeros, axes=(None, to))
        self.lora = lora

    def __call__(
        self, x_BLD: jax.Array, dtype: jnp.dtype | None = None, key: jax.Array | None = None
    ) -> jax.Array:
        dtype = dtype or x_BLD.dtype
        a_BLR = matmul(dropout(x_BLD, self.lora.rate, key), self.lora_a[...]).astype(x_BLD.dtype)
        adapted_BLF = self.lora.scale * matmul(a_BLR, self.lora_b[...])
        return (super().__call__(x_BLD, jnp.float32) + adapted_BLF).astype(dtype)

    def merged(self) -> jax.Array:
        """The kernel (D, F) of the plain layer that does the same."""
        return self.kernel[...] + self.lora.scale * self.lora_a[...] @ self.lora_b[...]


def linear_layers(model: nnx.Module) -> dict[tuple[str, ...], nnx.Module]:
    """The paths of its linear layers, each with the module that has the layer by the last name of the path."""
    return {
        (*map(str, path), name): parent
        for path, parent in nnx.iter_modules(model)
        for name, part in vars(parent).items()
        if isinstance(part, Linear)
    }


def is_target(path: tuple[str, ...], target: str) -> bool:
    """Whether a path ends with a target, whole names: "query", "function/down"."""
    names = tuple(target.split("/"))
    return path[-len(names) :] == names


def adapt(model: nnx.Module, targets: Iterable[str], lora: Lora, *, rngs: nnx.Rngs) -> int:
    """Freezes the model at values that will be given, and puts an adapter beside each linear layer that is a target.

    Returns:
      How many layers were adapted.
    """
    freeze_given(model)
    targets, found = tuple(targets), 0
    for path, parent in linear_layers(model).items():
        if any(is_target(path, target) for target in targets):
            setattr(parent, path[-1], LoraLinear(getattr(parent, path[-1]), lora, rngs=rngs))
            found += 1
    return found
