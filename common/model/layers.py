"""Scanned layers: a training step runs repeating layers, whose arrays are stacked, in a compiled loop.

The stacked array "blocks/[2,4,6]/kernel", (layers, M, N), holds "blocks/2/kernel", "blocks/4/kernel" and
"blocks/6/kernel", (M, N) each. Only the training step and its arguments have stacked arrays. Checkpoints and evaluation
have an array for each layer. `stack_layers` and `unstack_layers` convert between the two forms, by copies.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from common.variables import AbstractModel, split


def scan_layers(model: AbstractModel, least: int) -> AbstractModel:
    """Returns the model with scanned stacks, in which the arrays of repeating blocks are stacked (`common.model.scan`).

    Args:
      least: minimum number of blocks of a scanned stack; 0 scans no stack.
    """
    # The path of a parameter contains the index of its block. If no path contains the index `least - 1`, every stack
    # has fewer than `least` blocks, and no stack is scanned.
    if not least or not any(least - 1 in path for path in model.paths.values()):
        return model
    from common.model.scan import scan_stacks

    module = model.build(model.trainable, model.frozen)
    scan_stacks(module, least)
    return split(module)


def is_stacked(name: str) -> bool:
    """Returns whether the array `name` is stacked, with layers as first axis."""
    return "[" in name


def layers_of(name: str) -> list[str]:
    """Returns the names of the arrays that a stacked array holds; `[name]` if the array is not stacked."""
    if not is_stacked(name):
        return [name]
    before, layers, after = re.split(r"\[|\]", name)
    return [f"{before}{layer}{after}" for layer in layers.split(",")]


def unstack_layers(tree: Any) -> Any:
    """Replaces each stacked array by one array per layer, in all dictionaries {name: array} of a tree.

    The tree may be the optimizer state. Returns the new tree.
    """

    def unstack(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        return {
            layer: x
            for name, stacked in node.items()
            for layer, x in zip(layers_of(name), _unstack(name, stacked), strict=True)
        }

    return jax.tree.map(unstack, tree, is_leaf=_has(is_stacked))


def stack_layers(tree: Any, names: Iterable[str]) -> Any:
    """Inverse of `unstack_layers`.

    Args:
      names: names of the stacked arrays in the result. Other names have no effect.
    """
    found = {layer: name for name in names if is_stacked(name) for layer in layers_of(name)}

    def stack(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        new = dict.fromkeys(found.get(name, name) for name in node)
        return {name: _stack(name, [node[layer] for layer in layers_of(name)]) for name in new}

    return jax.tree.map(stack, tree, is_leaf=_has(found.__contains__))


def _has(condition: Callable[[str], bool]) -> Callable[[Any], bool]:
    """Returns a function that is True for a dictionary with at least one key that fulfils `condition`."""
    return lambda node: isinstance(node, dict) and any(map(condition, node))


def _unstack(name: str, x: Any) -> list:
    if not is_stacked(name):
        return [x]
    # In an optimizer state, x may be a placeholder of optax instead of an array. `optax.multi_transform` puts
    # placeholders into the state of an optimizer for all parameters that another optimizer updates.
    if not isinstance(x, jax.Array):
        return [x] * len(layers_of(name))
    sharding = NamedSharding(x.sharding.mesh, PartitionSpec(*x.sharding.spec[1:]))
    return jax.jit(jnp.unstack, out_shardings=sharding)(x)


def _stack(name: str, layers: list) -> Any:
    first = layers[0]
    if not is_stacked(name) or not isinstance(first, jax.Array):
        return first
    sharding = NamedSharding(first.sharding.mesh, PartitionSpec(None, *first.sharding.spec))
    return jax.jit(jnp.stack, out_shardings=sharding)(layers)
