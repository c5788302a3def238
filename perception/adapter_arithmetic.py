"""Merges LoRA adapters into base weights, and adds adapters (task arithmetic; Ilharco et al., 2022)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from common.errors import check
from common.model.low_rank import Lora
from common.variables import Params

A, B, KERNEL = "lora_a", "lora_b", "kernel"


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter.

    Attributes:
      base: fingerprint of the weights that the adapter was trained on; "" if unknown.
      layers: path of a layer in the encoder -> matrices A, (M, R), and B, (R, N). The adapter adds their product to the
        kernel.
    """

    base: str
    layers: Mapping[str, tuple[jax.Array, jax.Array]]

    @property
    def rank(self) -> int:
        """The largest rank among the adapter's layers."""
        return max(a.shape[1] for a, _ in self.layers.values())


def of_values(values: Params, lora: Lora, base: str) -> Adapter:
    """Returns the adapter in a run's parameters `values`, with each B multiplied by the LoRA scale.

    The matrices of a layer have the names "encoder/LAYER/lora_a" and "encoder/LAYER/lora_b" in `values`.
    """
    layers = {}
    for name, a_MR in values.items():
        layer, _, matrix = name.rpartition("/")
        if matrix == A:
            layers[layer.removeprefix("encoder/")] = a_MR, lora.scale * values[f"{layer}/{B}"]
    return Adapter(base, layers)


def combine(adapters: Sequence[tuple[Adapter, float]], option: str = "adapters") -> Adapter:
    """Returns the exact weighted sum of (adapter, weight) pairs.

    The rank of a layer is the sum of its ranks in the adapters that have the layer.

    Args:
      option: command-line option or argument that lists the adapters, for error messages.

    Raises:
      UserError: the fingerprints of two adapters are known and differ, or the shapes of A B differ in a layer.
    """
    known = [(number, x.base) for number, (x, _) in enumerate(adapters, 1) if x.base]
    first, base = known[0] if known else (1, "")
    for number, other in known[1:]:
        check(
            other == base,
            f"{option}: adapter {first} and adapter {number} were trained on different base weights (fingerprints"
            f" {base[:12]} and {other[:12]}): name adapters that were trained on the same base weights",
        )
    layers = {}
    for name in dict.fromkeys(name for adapter, _ in adapters for name in adapter.layers):
        parts = [(adapter.layers[name], w) for adapter, w in adapters if name in adapter.layers]
        shapes = [(a_MR.shape[0], b_RN.shape[1]) for (a_MR, b_RN), _ in parts]
        check(
            len({*shapes}) == 1,
            f"{option}: the adapters cannot be added, because in the layer {name} they change kernels of different"
            f" shapes, {' and '.join(map(str, dict.fromkeys(shapes)))}: name adapters that were trained on the same"
            " base weights",
        )
        layers[name] = (
            jnp.concatenate([a_MR for (a_MR, _), _ in parts], axis=1),
            jnp.concatenate([weight * b_RN for (_, b_RN), weight in parts], axis=0),
        )
    return Adapter(base, layers)


def merge(
    values: Params,
    adapter: Adapter,
    weight: float = 1.0,
    names: tuple[str, str] = ("the adapter", "the weights"),
) -> Params:
    """Returns the encoder's parameters plus `weight` times the adapter. Weight -1 undoes a merge, up to rounding.

    Args:
      values: path in the encoder -> parameter.
      names: names of the adapter and of the weights in error messages.

    Raises:
      UserError: `values` lacks the kernel of an adapted layer, or the kernel does not have the shape of A B.
    """
    merged, (what, weights) = dict(values), names
    for name, (a_MR, b_RN) in adapter.layers.items():
        kernel = values.get(f"{name}/{KERNEL}")
        check(
            kernel is not None,
            f"{what} changes the layer {name}, which is missing in {weights}: use weights of the model that the adapter"
            " was trained on",
        )
        shape = (a_MR.shape[0], b_RN.shape[1])
        check(
            kernel.shape == shape,
            f"in the layer {name}, {what} fits a kernel of shape {shape}, but the kernel in {weights} has the shape"
            f" {kernel.shape}: use weights of the model that the adapter was trained on",
        )
        change = jnp.matmul(a_MR, b_RN, precision=jax.lax.Precision.HIGHEST)
        merged[f"{name}/{KERNEL}"] = kernel + weight * change
    return merged
