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
from common.variables import freeze, give


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


def adapt(model: nnx.Module, targets: Iterable[str], lora: Lora, *, rngs: nnx.Rngs) -> int:
    """Freezes the model at values that will be given, and puts an adapter beside each linear layer that is a target.

    Args:
      targets: ends of paths, whole names: "query", "function/down".

    Returns:
      How many layers were adapted.
    """
    freeze(model)
    give(model)
    targets = tuple(tuple(target.split("/")) for target in targets)
    found = 0
    for path, parent in list(nnx.iter_modules(model)):
        for name, part in list(vars(parent).items()):
            names = (*map(str, path), name)
            if isinstance(part, Linear) and any(names[-len(t) :] == t for t in targets):
                setattr(parent, name, LoraLinear(part, lora, rngs=rngs))
                found += 1
    return found
