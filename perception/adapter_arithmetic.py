"""Task arithmetic on LoRA adapters (Ilharco et al., 2022): merging into base weights, and weighted sums.

M inputs, N outputs of a kernel, R rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from common.config import check
from common.variables import Params
from perception.lora import Lora

A, B, KERNEL = "lora_a", "lora_b", "kernel"


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter.

    Attributes:
      base: fingerprint of the weights that the adapter was trained on.
      layers: path of a layer in the encoder -> (A (M, R), B (R, N)). The adapter adds A B to the kernel.
    """

    base: str
    layers: Mapping[str, tuple[jax.Array, jax.Array]]

    @property
    def rank(self) -> int:
        """The largest rank of all layers."""
        return max(a.shape[1] for a, _ in self.layers.values())


def of_values(values: Params, lora: Lora, base: str) -> Adapter:
    """Extracts the adapter from the parameters of a model, whose names begin with "encoder/". Scales B."""
    names = [name.removesuffix(f"/{A}") for name in values if name.endswith(f"/{A}")]
    return Adapter(
        base,
        {
            name.removeprefix("encoder/"): (
                values[f"{name}/{A}"],
                lora.scale * values[f"{name}/{B}"],
            )
            for name in names
        },
    )


def combine(adapters: Sequence[tuple[Adapter, float]]) -> Adapter:
    """Returns the exact weighted sum of adapters, whose rank is the sum of the ranks.

    A layer that an adapter lacks counts as unchanged by that adapter.

    Raises:
      UserError: the adapters were trained on different weights.
    """
    first = adapters[0][0].base
    for number, (adapter, _) in enumerate(adapters[1:], 2):
        check(
            adapter.base == first,
            f"adapters 1 and {number} were trained on different weights (fingerprints {first[:12]} and"
            f" {adapter.base[:12]}) and cannot be added",
        )
    layers = {}
    for name in dict.fromkeys(name for adapter, _ in adapters for name in adapter.layers):
        parts = [(adapter.layers[name], w) for adapter, w in adapters if name in adapter.layers]
        layers[name] = (
            jnp.concatenate([a_MR for (a_MR, _), _ in parts], axis=1),
            jnp.concatenate([weight * b_RN for (_, b_RN), weight in parts], axis=0),
        )
    return Adapter(first, layers)


def merge(values: Params, adapter: Adapter, weight: float = 1.0) -> Params:
    """Returns the encoder's parameters plus `weight` times the adapter. Weight -1 undoes a merge, up to rounding.

    Raises:
      UserError: the encoder lacks a layer of the adapter, or its kernel has another shape.
    """
    merged = dict(values)
    for name, (a_MR, b_RN) in adapter.layers.items():
        kernel = values.get(f"{name}/{KERNEL}")
        check(kernel is not None, f"the adapter changes layer {name}, which these weights lack")
        shape = (a_MR.shape[0], b_RN.shape[1])
        check(
            kernel.shape == shape,
            f"layer {name}: the adapter needs a kernel of shape {shape}, but these weights have {kernel.shape}",
        )
        change = jnp.matmul(a_MR, b_RN, precision=jax.lax.Precision.HIGHEST)
        merged[f"{name}/{KERNEL}"] = kernel + weight * change
    return merged
