"""Adapters as vectors (task arithmetic; Ilharco et al., 2022): into base weights and out again, sums and multiples.

D inputs, F outputs, R rank.
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
    """What LoRA learned of some layers.

    Attributes:
      base: fingerprint of the weights that it was learned on.
      layers: path of a layer in the encoder -> (A (D, R), B (R, F)); its kernel changes by A B.
    """

    base: str
    layers: Mapping[str, tuple[jax.Array, jax.Array]]

    @property
    def rank(self) -> int:
        """The largest."""
        return max(a.shape[1] for a, _ in self.layers.values())


def of_values(values: Params, lora: Lora, base: str) -> Adapter:
    """The adapter among the values of a model, which begin with "encoder/"; its scale goes into B."""
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
    """The weighted sum of changes, exact: its rank is the sum of the ranks. A layer need not be in all of them.

    Raises:
      UserError: they were learned on different weights.
    """
    first = adapters[0][0].base
    for number, (adapter, _) in enumerate(adapters[1:], 2):
        check(
            adapter.base == first,
            f"adapters 1 and {number} were trained on different weights (fingerprints {first[:12]} and"
            f" {adapter.base[:12]}): their sum has no meaning",
        )
    layers = {}
    for name in dict.fromkeys(name for adapter, _ in adapters for name in adapter.layers):
        parts = [(adapter.layers[name], w) for adapter, w in adapters if name in adapter.layers]
        layers[name] = (
            jnp.concatenate([a_DR for (a_DR, _), _ in parts], axis=1),
            jnp.concatenate([weight * b_RF for (_, b_RF), weight in parts], axis=0),
        )
    return Adapter(first, layers)


def merge(values: Params, adapter: Adapter, weight: float = 1.0) -> Params:
    """The encoder's values with the change in them, `weight` times; -1 takes it out again, to float rounding.

    Raises:
      UserError: the encoder lacks a layer of the adapter, or has it in another shape.
    """
    merged = dict(values)
    for name, (a_DR, b_RF) in adapter.layers.items():
        kernel = values.get(f"{name}/{KERNEL}")
        check(kernel is not None, f"the adapter is for a layer {name}, which these weights lack")
        shape = (a_DR.shape[0], b_RF.shape[1])
        check(
            kernel.shape == shape,
            f"{name}: the adapter is for a kernel of {shape}, these weights have {kernel.shape}",
        )
        change = jnp.matmul(a_DR, b_RF, precision=jax.lax.Precision.HIGHEST)
        merged[f"{name}/{KERNEL}"] = kernel + weight * change
    return merged
