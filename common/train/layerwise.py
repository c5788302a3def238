"""Applies an optimizer rule, such as Adafactor, to each layer of stacked arrays (`common.model.layers`)."""

from collections import ChainMap
from collections.abc import Callable
from typing import Any

import jax
import optax

from common.model.layers import is_stacked, layers_of


def layerwise(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns a rule that updates each layer of a stacked array as `rule` updates a separate array.

    The state has the tree structure of the state of `rule`. In the state's dictionaries {name: array}, a stacked array
    has the layers as first axis. A value outside of the dictionaries, such as a counter, is shared by all arrays.
    """

    def is_dict(node: Any) -> bool:
        return isinstance(node, dict)

    def axes(tree: Any) -> Any:
        return jax.tree.map(lambda node: 0 if is_dict(node) else None, tree, is_leaf=is_dict)

    def run(function: Callable, result: Any, *trees: Any) -> Any:
        """Returns function(*trees), computed for each group of arrays with the same number of layers.

        `result` has the tree structure of the returned tree.
        """
        groups: dict[int, list[str]] = {}
        for name in trees[0]:
            groups.setdefault(len(layers_of(name)) if is_stacked(name) else 0, []).append(name)
        results = []
        for layers, names in groups.items():

            def select(node: Any, names: list[str] = names) -> Any:
                return {name: node[name] for name in names} if is_dict(node) else node

            own = jax.tree.map(select, trees, is_leaf=is_dict)
            of_group = jax.vmap(function, axes(own), axes(result)) if layers else function
            results.append(of_group(*own))

        def merge(*nodes: Any) -> Any:
            return dict(ChainMap(*nodes)) if is_dict(nodes[0]) else nodes[0]

        return jax.tree.map(merge, *results, is_leaf=is_dict)

    def init(params: Any) -> Any:
        return run(rule.init, jax.eval_shape(rule.init, params), params)

    def update(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
        return run(rule.update, (updates, state), updates, state, params)

    return optax.GradientTransformation(init, update)
