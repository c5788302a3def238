"""Trainable and frozen variables, and the initialization of frozen layers from a seed.

NNX describes the model; training works on plain dictionaries `{path: array}`, with paths such as
"encoder/blocks/2/residuals/0/function/query/kernel". `AbstractModel` converts between the two.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx

Params = dict[str, Any]


class Frozen(nnx.Variable):
    """A variable that is never trained: no gradient, no optimizer state, no weight decay.

    Its metadata `draw` is the spec of its initializer (see the function `draw`), or None if its value is loaded, such
    as a pretrained weight.
    """


@dataclass(frozen=True)
class AbstractModel:
    """A model without values.

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
        """Returns the model with the values {path: array}. The compiled step calls this method while tracing."""
        values = {self.paths[name]: value for name, value in {**trainable, **frozen}.items()}
        return nnx.merge(self.graphdef, nnx.from_flat_state(values))

    def shapes(self) -> tuple[Params, Params]:
        """Returns the shapes and dtypes of the trainable and the frozen variables, {path: abstract array} each."""
        trainable, frozen = (
            {name: jax.ShapeDtypeStruct(v.shape, v.dtype) for name, v in kind.items()}
            for kind in (self.trainable, self.frozen)
        )
        return trainable, frozen

    @property
    def drawn(self) -> dict[str, nnx.Variable]:
        """The frozen variables that are initialised from the seed."""
        return {name: v for name, v in self.frozen.items() if v.get_metadata("draw") is not None}


class ParamKeys:
    """Replaces `nnx.Rngs(seed)` while a model is traced; `params` returns the same keys in the same order.

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
    """Returns the abstract model of `model`. The variables may be abstract (`nnx.eval_shape`)."""
    graphdef, *states = nnx.split(model, nnx.Param, Frozen)
    paths, kinds = {}, []
    for state in states:
        flat = {"/".join(map(str, path)): (path, v) for path, v in nnx.to_flat_state(state)}
        paths |= {name: path for name, (path, _) in flat.items()}
        kinds.append({name: variable for name, (_, variable) in flat.items()})
    return AbstractModel(graphdef, *kinds, paths)


def abstract(build: Callable[[], nnx.Module]) -> AbstractModel:
    """Returns the abstract model of the model that `build` makes, without allocating any array."""
    return split(nnx.eval_shape(build))


ORTHOGONAL = ("orthogonal", 1.0)
"""The default initializer of frozen matrices: orthogonal with gain 1."""


def _below(
    module: nnx.Module, kind: type[nnx.Variable]
) -> Iterator[tuple[tuple, nnx.Module, nnx.Variable]]:
    """Yields (path, submodule, variable) of each variable of type `kind`. The caller may replace yielded variables."""
    for path, part in list(nnx.iter_modules(module)):
        for name, variable in list(vars(part).items()):
            if isinstance(variable, kind):
                yield (*path, name), part, variable


def draws(module: nnx.Module, matrix: tuple) -> Iterator[tuple[nnx.Module, str, tuple]]:
    """Yields (submodule, attribute, initializer) of every Param in `module`.

    An initializer is a spec of the function `draw`. The submodule's `frozen_init()` returns the initializers.

    Args:
      matrix: the initializer of kernels. `frozen_init()` returns ("matrix",) for these.

    Raises:
      ValueError: a submodule has no initializer for one of its parameters.
    """
    for path, part, _ in _below(module, nnx.Param):
        known = part.frozen_init() if hasattr(part, "frozen_init") else {}
        if path[-1] not in known:
            raise ValueError(
                f"{'/'.join(map(str, path))} cannot be initialised from a seed:"
                f" {type(part).__name__}.frozen_init() has no entry for it"
            )
        draw = known[path[-1]]
        yield part, path[-1], matrix if draw == ("matrix",) else draw


def freeze(module: nnx.Module, matrix: tuple = ORTHOGONAL) -> None:
    """Turns every Param in `module` into a Frozen variable that is initialised from the seed.

    Args:
      matrix: the initializer of kernels, a spec of the function `draw`.

    Raises:
      ValueError: a submodule has no initializer for one of its parameters.
    """
    for part, name, draw in draws(module, matrix):
        _freeze(part, name, draw)


def freeze_given(module: nnx.Module) -> None:
    """Turns every Param in `module` into a Frozen variable whose value is loaded, such as a pretrained weight."""
    for path, part, _ in _below(module, nnx.Param):
        _freeze(part, path[-1], None)
    give(module)


def _freeze(part: nnx.Module, name: str, draw: tuple | None) -> None:
    variable = getattr(part, name)
    metadata = {"axes": variable.get_metadata("axes"), "draw": draw}
    setattr(part, name, Frozen(variable.get_value(), **metadata))


def give(module: nnx.Module) -> None:
    """Marks the Frozen variables in `module` as loaded rather than seed-initialised."""
    for _, _, variable in _below(module, Frozen):
        variable.set_metadata(draw=None)


def cast_frozen(module: nnx.Module, dtype: Any) -> None:
    """Casts all loaded Frozen matrices in `module` to `dtype`. Seed-initialised matrices stay in float32."""
    for _, _, variable in _below(module, Frozen):
        value = variable.get_value()
        if variable.get_metadata("draw") is None and value.ndim == 2:
            variable.set_value(value.astype(dtype))


def thaw(module: nnx.Module) -> None:
    """Turns every Frozen variable in `module` into a Param."""
    for path, part, variable in _below(module, Frozen):
        thawed = nnx.Param(variable.get_value(), axes=variable.get_metadata("axes"))
        setattr(part, path[-1], thawed)


def draw(spec: tuple, seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the initial value of a frozen variable, in float32.

    The value is drawn in float64 on the host, so it is the same on every device.

    Args:
      spec: the initializer.
        ("orthogonal", gain): a (semi-)orthogonal matrix times gain.
        ("xavier", gain): a matrix (inputs, outputs), uniform in [-a, a] with a = gain sqrt(6 / (inputs + outputs)).
        ("fan_in", gain): a matrix (inputs, outputs), normal with standard deviation gain / sqrt(inputs).
        ("uniform", bound): uniform in [-bound, bound].
        ("normal", deviation): normal with mean 0 and standard deviation `deviation`.
        ("ones",), ("zeros",).
      seed, name: the seed of the run and the path of the variable; together they are the key of the random generator.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    match spec:
        case ("orthogonal", gain):
            rows, columns = shape
            q, r = np.linalg.qr(generator.standard_normal((max(shape), min(shape))))
            # With positive diagonals of r, q is uniform over orthogonal matrices and does not depend on LAPACK.
            q = q * np.sign(np.diagonal(r))
            value = gain * (q if rows >= columns else q.T)
        case ("xavier", gain):
            bound = gain * np.sqrt(6 / sum(shape))
            value = generator.uniform(-bound, bound, shape)
        case ("fan_in", gain):
            value = gain / np.sqrt(shape[0]) * generator.standard_normal(shape)
        case ("uniform", bound):
            value = generator.uniform(-bound, bound, shape)
        case ("normal", deviation):
            value = deviation * generator.standard_normal(shape)
        case ("ones",):
            value = np.ones(shape)
        case ("zeros",):
            value = np.zeros(shape)
        case _:
            raise ValueError(f"unknown initializer {spec!r} of {name}")
    return value.astype(np.float32)


def draw_frozen(abstract_model: AbstractModel, seed: int) -> dict[str, np.ndarray]:
    """Returns {path: initial value} of all seed-initialised frozen variables, as host arrays."""
    return {
        name: draw(v.get_metadata("draw"), seed, name, v.shape)
        for name, v in abstract_model.drawn.items()
    }


def fingerprint(values: Mapping[str, np.ndarray]) -> str:
    """Returns the SHA-256 of the names and float32 bytes of arrays, as 64 hex digits."""
    digest = hashlib.sha256()
    for name in sorted(values):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(values[name], np.float32).tobytes())
    return digest.hexdigest()


def count(abstract_model: AbstractModel) -> dict[str, int]:
    """Returns the numbers of trainable, frozen and all parameters."""
    kinds = abstract_model.trainable, abstract_model.frozen
    trainable, frozen = (sum(map(_size, variables.values())) for variables in kinds)
    return {"trainable": trainable, "frozen": frozen, "total": trainable + frozen}


def count_by_group(abstract_model: AbstractModel) -> list[tuple[str, int, int, int]]:
    """Returns parameter counts as rows (group, trainable, frozen, total).

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

    A quantized variable packs several parameters into one element; its metadata `holds` is the shape before packing.
    """
    return int(np.prod(variable.get_metadata("holds", variable.shape)))


def _group(name: str) -> str:
    parts = name.split("/")
    end = parts.index("blocks") + 2 if "blocks" in parts else -1
    return "/".join(parts[:end] or parts)
