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

    Metadata `draw` is its initializer (see `draw`); None marks a value that was loaded, such as a pretrained weight.
    """


@dataclass(frozen=True)
class AbstractModel:
    """A model without values: its graph, and shapes and metadata of its variables by path."""

    graphdef: nnx.GraphDef
    trainable: Mapping[str, nnx.Variable]
    frozen: Mapping[str, nnx.Variable]
    paths: Mapping[str, tuple]

    def build(self, trainable: Params, frozen: Params) -> nnx.Module:
        """The model with these values; cheap enough to call while tracing."""
        values = {self.paths[name]: value for name, value in {**trainable, **frozen}.items()}
        return nnx.merge(self.graphdef, nnx.from_flat_state(values))

    @property
    def drawn(self) -> dict[str, nnx.Variable]:
        """The frozen variables that are initialised from the seed."""
        return {name: v for name, v in self.frozen.items() if v.get_metadata("draw") is not None}


class ParamKeys:
    """Yields the keys of `nnx.Rngs(seed).params()` in their order.

    Stands in for `nnx.Rngs`, whose counter is a traced array: tracing with it took time quadratic in depth
    (phi-2: 58 s, with this class 3 s).
    """

    def __init__(self, seed: int | jax.Array):
        self._key = jax.random.key(seed) if isinstance(seed, int) else seed
        self._used = 0

    def params(self) -> jax.Array:
        self._used += 1
        return jax.random.fold_in(self._key, self._used - 1)


def split(model: nnx.Module) -> AbstractModel:
    """The variables of a model by kind and path; the model may come from `nnx.eval_shape`."""
    graphdef, trainable, frozen = nnx.split(model, nnx.Param, Frozen)
    flat = {
        kind: {
            "/".join(map(str, path)): (path, variable)
            for path, variable in nnx.to_flat_state(state)
        }
        for kind, state in (("trainable", trainable), ("frozen", frozen))
    }
    return AbstractModel(
        graphdef,
        {name: variable for name, (_, variable) in flat["trainable"].items()},
        {name: variable for name, (_, variable) in flat["frozen"].items()},
        {name: path for names in flat.values() for name, (path, _) in names.items()},
    )


def abstract(build: Callable[[], nnx.Module]) -> AbstractModel:
    """The abstract model of `build`, without allocating any array."""
    return split(nnx.eval_shape(build))


ORTHOGONAL = ("orthogonal", 1.0)
"""The default initializer of frozen matrices: orthogonal with gain 1."""


def draws(module: nnx.Module, matrix: tuple) -> Iterator[tuple[nnx.Module, str, tuple]]:
    """Yields (part, attribute, draw) of every Param below `module`, as the part's `frozen_init()` say.

    Args:
      matrix: the draw that ("matrix",) stands for there.

    Raises:
      ValueError: a part does not say how one of its parameters is drawn.
    """
    for path, part in list(nnx.iter_modules(module)):
        known = part.frozen_init() if hasattr(part, "frozen_init") else {}
        for name, variable in list(vars(part).items()):
            if not isinstance(variable, nnx.Param):
                continue
            if name not in known:
                raise ValueError(
                    f"{'/'.join(map(str, (*path, name)))} cannot be drawn from a seed:"
                    f" {type(part).__name__}.frozen_init() has to say how"
                )
            yield part, name, matrix if known[name] == ("matrix",) else known[name]


def freeze(module: nnx.Module, matrix: tuple = ORTHOGONAL) -> None:
    """Turns every Param below `module` into a Frozen variable that is initialised from the seed (see `draws`).

    Raises:
      ValueError: a parameter has no initializer.
    """
    for part, name, draw in draws(module, matrix):
        _freeze(part, name, draw)


def freeze_given(module: nnx.Module) -> None:
    """Turns every Param below `module` into a Frozen variable whose value is loaded, such as a pretrained weight."""
    for _, part in nnx.iter_modules(module):
        for name, variable in list(vars(part).items()):
            if isinstance(variable, nnx.Param):
                _freeze(part, name, None)
    give(module)


def _freeze(part: nnx.Module, name: str, draw: tuple | None) -> None:
    variable = getattr(part, name)
    metadata = {"axes": variable.get_metadata("axes"), "draw": draw}
    setattr(part, name, Frozen(variable.get_value(), **metadata))


def give(module: nnx.Module) -> None:
    """Marks the Frozen variables below `module` as loaded rather than seed-initialised."""
    for _, part in nnx.iter_modules(module):
        for variable in vars(part).values():
            if isinstance(variable, Frozen):
                variable.set_metadata(draw=None)


def cast_frozen(module: nnx.Module, dtype: Any) -> None:
    """Casts loaded Frozen matrices below `module` to the compute dtype, which halves their memory in bfloat16."""
    for _, part in nnx.iter_modules(module):
        for variable in vars(part).values():
            if isinstance(variable, Frozen) and variable.get_metadata("draw") is None:
                value = variable.get_value()
                variable.set_value(value.astype(dtype) if value.ndim == 2 else value)


def thaw(module: nnx.Module) -> None:
    """Turns every Frozen variable below `module` into a Param."""
    for _, part in nnx.iter_modules(module):
        for name, variable in list(vars(part).items()):
            if isinstance(variable, Frozen):
                axes = variable.get_metadata("axes")
                setattr(part, name, nnx.Param(variable.get_value(), axes=axes))


def draw(spec: tuple, seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Initialises a frozen value: drawn in float64 on the host, rounded to float32, the same on every device.

    Args:
      spec: of a matrix (inputs, outputs): ("orthogonal", gain) gain times a (semi-)orthogonal one; ("xavier", gain)
      uniform up to gain sqrt(6 / (inputs + outputs)); ("fan_in", gain) normal of deviation gain / sqrt(inputs). Of any
      shape: ("uniform", bound) in [-bound, bound]; ("normal", deviation) around 0; ("ones",); ("zeros",).
      name: the variable's path; with the seed it is the key of the draw.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    match spec:
        case ("orthogonal", gain):
            rows, columns = shape
            q, r = np.linalg.qr(generator.standard_normal((max(shape), min(shape))))
            # The sign makes the distribution uniform over orthogonal matrices and independent of LAPACK's signs.
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
            raise ValueError(f"unknown draw {spec!r}")
    return value.astype(np.float32)


def draw_frozen(abstract_model: AbstractModel, seed: int) -> dict[str, np.ndarray]:
    """All seed-initialised frozen values, on the host."""
    return {
        name: draw(v.get_metadata("draw"), seed, name, v.shape)
        for name, v in abstract_model.drawn.items()
    }


def fingerprint(values: Mapping[str, np.ndarray]) -> str:
    """SHA-256 over names and float32 bytes of frozen values."""
    digest = hashlib.sha256()
    for name in sorted(values):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(values[name], np.float32).tobytes())
    return digest.hexdigest()


def count(abstract_model: AbstractModel) -> dict[str, int]:
    """Number of parameters: trainable, frozen, total."""
    sizes = {
        kind: sum(map(_size, getattr(abstract_model, kind).values()))
        for kind in ("trainable", "frozen")
    }
    return {**sizes, "total": sum(sizes.values())}


def count_by_group(abstract_model: AbstractModel) -> list[tuple[str, int, int, int]]:
    """Rows (group, trainable, frozen, total); a group is an embedding or one block of a stack."""
    rows: dict[str, list[int]] = {}
    for column, kind in enumerate(("trainable", "frozen")):
        for name, variable in getattr(abstract_model, kind).items():
            row = rows.setdefault(_group(name), [0, 0])
            row[column] += _size(variable)

    def order(group: str) -> tuple:
        return tuple((0, int(p), "") if p.isdigit() else (1, 0, p) for p in group.split("/"))

    return [(g, rows[g][0], rows[g][1], sum(rows[g])) for g in sorted(rows, key=order)]


def _size(variable: nnx.Variable) -> int:
    """The number of parameters in a variable; a packed one names their shape in its metadata `holds`."""
    return int(np.prod(variable.get_metadata("holds", variable.shape)))


def _group(name: str) -> str:
    parts = name.split("/")
    end = parts.index("blocks") + 2 if "blocks" in parts else -1
    return "/".join(parts[:end] or parts)
