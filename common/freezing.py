"""Freezes layers, and initialises frozen layers from a seed."""

import hashlib
from collections.abc import Iterator, Mapping

import numpy as np
from flax import nnx

from common.errors import UserError
from common.variables import AbstractModel, Frozen

ORTHOGONAL = ("orthogonal", 1.0)
"""The default initializer of frozen matrices: orthogonal with gain 1."""


def variables_below(
    module: nnx.Module, kind: type[nnx.Variable]
) -> Iterator[tuple[tuple, nnx.Module, nnx.Variable]]:
    """Yields (path, submodule, variable) for each variable of type `kind`. Callers may replace the variable."""
    for path, part in list(nnx.iter_modules(module)):
        for name, variable in list(vars(part).items()):
            if isinstance(variable, kind):
                yield (*path, name), part, variable


def draws(module: nnx.Module, matrix: tuple) -> list[tuple[nnx.Module, str, tuple]]:
    """Returns (submodule, name of the Param in the submodule, initializer) for every Param in `module`.

    The initializers are specs of the function `draw`, and come from the method `frozen_init()` of each submodule.

    Args:
      matrix: the initializer that replaces the spec ("matrix",), which `frozen_init()` returns for kernels.

    Raises:
      UserError: a submodule has no initializer for one of its parameters.
    """
    found = []
    for path, part, _ in variables_below(module, nnx.Param):
        known = part.frozen_init() if hasattr(part, "frozen_init") else {}
        if path[-1] not in known:
            raise UserError(
                f"{'/'.join(map(str, path))} cannot be initialised from a seed: give {type(part).__name__} a method"
                f" frozen_init() that returns {{{path[-1]!r}: INITIALIZER}}, an initializer of common.freezing.draw"
                " such as ('zeros',)"
            )
        draw = known[path[-1]]
        found.append((part, path[-1], matrix if draw == ("matrix",) else draw))
    return found


def freeze(module: nnx.Module, matrix: tuple = ORTHOGONAL) -> None:
    """Turns every Param in `module` into a Frozen variable that is initialised from the run's seed.

    For `matrix`, the initializer of kernels, and for the UserError see `draws`.
    """
    for part, name, draw in draws(module, matrix):
        _freeze(part, name, draw)


def freeze_loaded(module: nnx.Module) -> None:
    """Turns every Param in `module` into a Frozen variable whose value is loaded, such as a pretrained weight.

    Marks variables of `module` that are already Frozen as loaded, too.
    """
    for path, part, _ in variables_below(module, nnx.Param):
        _freeze(part, path[-1], None)
    mark_loaded(module)


def _freeze(part: nnx.Module, name: str, draw: tuple | None) -> None:
    variable = getattr(part, name)
    metadata = {"axes": variable.get_metadata("axes"), "draw": draw}
    setattr(part, name, Frozen(variable.get_value(), **metadata))


def mark_loaded(module: nnx.Module) -> None:
    """Marks the Frozen variables in `module` as loaded rather than seed-initialised."""
    for _, _, variable in variables_below(module, Frozen):
        variable.set_metadata(draw=None)


def thaw(module: nnx.Module) -> None:
    """Turns every Frozen variable in `module` into a Param."""
    for path, part, variable in variables_below(module, Frozen):
        thawed = nnx.Param(variable.get_value(), axes=variable.get_metadata("axes"))
        setattr(part, path[-1], thawed)


def draw(spec: tuple, seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the initial value of a frozen variable, in float32.

    Draws in float64 on the host, so that the value does not depend on the accelerator.

    Args:
      spec: the initializer.
        ("orthogonal", gain): a (semi-)orthogonal matrix times gain.
        ("xavier", gain): a matrix (inputs, outputs), uniform in [-a, a] with a = gain sqrt(6 / (inputs + outputs)).
        ("fan_in", gain): a matrix (inputs, outputs), normal with standard deviation gain / sqrt(inputs).
        ("uniform", bound): uniform in [-bound, bound].
        ("normal", deviation): normal with mean 0 and standard deviation `deviation`.
        ("ones",), ("zeros",).
      seed, name: the seed of the run and the path of the variable; together they are the key of the random generator.

    Raises:
      UserError: the initializer is unknown, or is "orthogonal" and the shape does not have two dimensions.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    match spec:
        case ("orthogonal", gain) if len(shape) == 2:
            rows, columns = shape
            q, r = np.linalg.qr(generator.standard_normal((max(shape), min(shape))))
            # Make the diagonal of r positive: then q is uniformly distributed, and does not depend on the signs that
            # LAPACK chooses.
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
            raise UserError(
                f"{name}: {spec!r} is not an initializer for the shape {shape}; use an initializer of"
                " common.freezing.draw, such as ('zeros',)"
            )
    return value.astype(np.float32)


def draw_frozen(abstract_model: AbstractModel, seed: int) -> dict[str, np.ndarray]:
    """Returns {path: initial value} of all seed-initialised frozen variables, as host arrays."""
    return {
        name: draw(v.get_metadata("draw"), seed, name, v.shape)
        for name, v in abstract_model.seed_initialised.items()
    }


def fingerprint(values: Mapping[str, np.ndarray]) -> str:
    """Returns the SHA-256 of the names and float32 bytes of arrays, as 64 hex digits."""
    digest = hashlib.sha256()
    for name in sorted(values):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(values[name], np.float32).tobytes())
    return digest.hexdigest()
