"""Checks a user's method of fine-tuning a classifier before training."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from common import variables
from common.errors import check
from common.user_parts import described, user_code
from common.variables import AbstractModel, ParamKeys


def check_complete(
    option: str,
    kind: type,
    make: Callable[[ParamKeys], nnx.Module],
    classes: int,
    known: Mapping[str, tuple[int, ...]],
    lacks: str,
    loads: bool = True,
) -> AbstractModel:
    """Builds the model that a user's method has changed, and traces a forward pass. Returns the abstract model.

    Args:
      option: "--config.NAME=VALUE", which names the method, for error messages.
      kind: dataclass of the method.
      make: function from random keys to the changed model. The model maps (tokens, lengths) to logits (B, classes).
      known: name -> shape of each parameter that the model must keep.
      lacks: reason why a frozen parameter has no value, such as "the backbone lacks it", for the error message.
      loads: whether the parameters in `known` get pretrained values.

    Raises:
      UserError: the method raises an exception, or the model has an output of the wrong shape, trains no parameter,
        lacks or reshapes a parameter in `known`, or has a parameter without logical axes or a frozen parameter without
        a value.
    """
    rows, length = 2, 2

    def forward(trainable, frozen):
        model = abstract_model.build(trainable, frozen)
        return model(jnp.zeros((rows, length), jnp.int32), jnp.full(rows, length))

    with user_code(option, kind, "config"):
        abstract_model = variables.abstract(make)
        logits = jax.eval_shape(forward, *abstract_model.shapes())
    check(
        getattr(logits, "shape", None) == (rows, classes),
        f"{option}: for {rows} texts and {classes} classes, the model returned {described(logits)} instead of"
        f" logits, an array of shape {(rows, classes)}; return logits",
    )
    check(bool(abstract_model.trainable), f"{option} freezes all parameters: train at least one")
    found = {**abstract_model.trainable, **abstract_model.frozen}
    for name, wanted in known.items():
        check(name in found, f"{option} removes the parameter {name}: keep this parameter")
        shape = found[name].shape
        check(
            shape == wanted,
            f"{option} changes the shape of the parameter {name} from {wanted} to {shape}: keep the shape",
        )
    for name, variable in found.items():
        axes, ndim = variable.get_metadata("axes", None), len(variable.shape)
        check(
            axes is not None and len(axes) == ndim,
            f"{option}: the parameter {name} has {ndim} dimension{'s' * (ndim != 1)} and the axes {axes}: name one"
            f" logical axis, or None, for each dimension, such as nnx.Param(value, axes={(None,) * ndim})",
        )
    for name in abstract_model.frozen:
        check(
            name in abstract_model.seed_initialised or (loads and name in known),
            f"{option}: the frozen parameter {name} has no value, because {lacks}: draw it from the seed with"
            " common.freezing.freeze",
        )
    return abstract_model
