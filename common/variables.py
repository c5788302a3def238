"""Trainable and frozen variables of a model.

NNX describes the model; training works on plain dictionaries `{path: array}`, with paths such as
"encoder/blocks/2/residuals/0/function/query/kernel". `AbstractModel` converts between the two.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx

Params = dict[str, Any]


class Frozen(nnx.Variable):
    """A variable that is never trained: no gradient, no optimizer state, no weight decay.

    Its metadata `draw` is the spec of its initializer (`common.freezing.draw`), or None if its value is loaded, such
    as a pretrained weight.
    """


@dataclass(frozen=True)
class AbstractModel:
    """The graph and the variables of a model. The variables have no values if `abstract` has made the model.

    Attributes:
      graphdef: graph of the model.
      trainable, frozen: path as text -> variable with shape, dtype and metadata.
      paths: path as text -> path in the graph.
    """

    graphdef: nnx.GraphDef
    trainable: Mapping[str, nnx.Variable]
    frozen: Mapping[str, nnx.Variable]
    paths: Mapping[str, tuple]

    def build(self, trainable: Params, frozen: Params) -> nnx.Module:
        """Returns the model with the values {path: array}. Training and evaluation call this method while tracing."""
        values = {self.paths[name]: value for name, value in {**trainable, **frozen}.items()}
        return nnx.merge(self.graphdef, nnx.from_flat_state(values))

    def shapes(self) -> tuple[Params, Params]:
        """Returns two dictionaries {path: abstract array}: of the trainable and of the frozen variables."""
        return tuple(
            {name: jax.ShapeDtypeStruct(v.shape, v.dtype) for name, v in kind.items()}
            for kind in (self.trainable, self.frozen)
        )

    @property
    def seed_initialised(self) -> dict[str, nnx.Variable]:
        """The frozen variables that are initialised from the seed."""
        return {name: v for name, v in self.frozen.items() if v.get_metadata("draw") is not None}


class ParamKeys:
    """Replaces `nnx.Rngs(seed)` while a model is traced. `params()` returns the same keys as `nnx.Rngs(seed).params()`.

    The counter of `nnx.Rngs` is a traced array, which makes the tracing time quadratic in depth: 58 s for phi-2,
    instead of 3 s with this class.
    """

    def __init__(self, seed: int | jax.Array):
        self._key = jax.random.key(seed) if isinstance(seed, int) else seed
        self._used = 0

    def params(self) -> jax.Array:
        self._used += 1
        return jax.random.fold_in(self._key, self._used - 1)


def split(model: nnx.Module) -> AbstractModel:
    """Returns the graph and the variables of `model`. The variables keep their values, unless they are abstract."""
    graphdef, *states = nnx.split(model, nnx.Param, Frozen)
    paths, kinds = {}, []
    for state in states:
        flat = {"/".join(map(str, path)): (path, v) for path, v in nnx.to_flat_state(state)}
        paths |= {name: path for name, (path, _) in flat.items()}
        kinds.append({name: variable for name, (_, variable) in flat.items()})
    return AbstractModel(graphdef, *kinds, paths)


def abstract(build: Callable[[ParamKeys], nnx.Module]) -> AbstractModel:
    """Returns the abstract form of the model that `build` makes from random keys. Allocates no array."""
    return split(nnx.eval_shape(lambda: build(ParamKeys(0))))


def count(abstract_model: AbstractModel) -> dict[str, int]:
    """Returns the numbers of parameters, as a dictionary with the keys "trainable", "frozen" and "total"."""
    kinds = abstract_model.trainable, abstract_model.frozen
    trainable, frozen = (sum(map(_size, variables.values())) for variables in kinds)
    return {"trainable": trainable, "frozen": frozen, "total": trainable + frozen}


def count_by_group(abstract_model: AbstractModel) -> list[tuple[str, int, int, int]]:
    """Returns parameter counts as rows (group, trainable, frozen, total), one row for each group.

    A group is one block of a stack, or a module outside of the blocks, such as an embedding.
    """
    rows: dict[str, list[int]] = {}
    for column, kind in enumerate((abstract_model.trainable, abstract_model.frozen)):
        for name, variable in kind.items():
            rows.setdefault(_group(name), [0, 0])[column] += _size(variable)

    def order(group: str) -> tuple:
        return tuple((0, int(p), "") if p.isdigit() else (1, 0, p) for p in group.split("/"))

    return [(group, *rows[group], sum(rows[group])) for group in sorted(rows, key=order)]


def _size(variable: nnx.Variable) -> int:
    """Returns the number of parameters in a variable.

    This is the product of the numbers in the metadata `holds` or, if the variable lacks `holds`, of its shape. For the
    codes of a quantized kernel, which are padded and may be packed, `holds` is the shape of the kernel. For the scales,
    `holds` is (0,), because they do not count as parameters.
    """
    return int(np.prod(variable.get_metadata("holds", variable.shape)))


def _group(name: str) -> str:
    parts = name.split("/")
    end = parts.index("blocks") + 2 if "blocks" in parts else -1
    return "/".join(parts[:end] or parts)
