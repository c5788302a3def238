"""Checks a user-defined method of fine-tuning, a `Method` from outside this project, before training."""

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from common import variables
from common.errors import check
from common.user_code import user_code
from perception.backbones import Backbone
from perception.finetuning import ENCODER, encoder_parameters, make_model
from perception.head import BIAS, KERNEL
from perception.methods import FINETUNE, Method, find


def check_complete(config: ConfigDict, shape: Backbone, classes: int) -> None:
    """Checks a user's method by building the model and tracing a forward pass.

    Raises:
      UserError: `change` fails, the model has an output of a wrong shape or no trained parameter, lacks a parameter of
        the backbone, or has a parameter without sharding axes or without a value.
    """
    option, method = f"{FINETUNE}={config.finetune}", find(config.finetune)
    config = config.copy_and_resolve_references()
    config.quantize = "none"  # a quantized kernel has other names
    rows, length = 2, 2

    def forward(trainable, frozen):
        model = abstract_model.build(trainable, frozen)
        return model(jnp.zeros((rows, length), jnp.int32), jnp.full(rows, length))

    with user_code(option, Method, "config"):
        abstract_model = variables.abstract(
            lambda: make_model(config, shape, classes, rngs=variables.ParamKeys(0))
        )
        logits = jax.eval_shape(forward, *abstract_model.shapes())
    check(
        logits.shape == (rows, classes),
        f"{option}: the model returned an array of shape {logits.shape}; expected {(rows, classes)}",
    )
    check(bool(abstract_model.trainable), f"{option} freezes all parameters: train at least one")
    found = {**abstract_model.trainable, **abstract_model.frozen}
    known = {ENCODER + name: v.shape for name, v in encoder_parameters(shape).items()}
    for name, wanted in known.items():
        check(
            name in found and found[name].shape == wanted,
            f"{option} removes the parameter {name}, or changes its shape {wanted}: keep and freeze the parameter",
        )
    trained = abstract_model.trainable.keys() - {KERNEL, BIAS}
    for name, variable in found.items():
        axes = variable.get_metadata("axes", None)
        check(
            axes is not None and len(axes) == len(variable.shape),
            f"{option}: the parameter {name} has {len(variable.shape)} dimensions and the axes {axes}: name one axis"
            " for each dimension, such as nnx.Param(value, axes=(None,))",
        )
        check(
            not method.adapters or name not in trained or "lora_" in name,
            f"{option} trains the parameter {name} beside adapters: set adapters=False",
        )
    for name in abstract_model.frozen:
        check(
            name in abstract_model.seed_initialised or (method.pretrained and name in known),
            f"{option}: the frozen parameter {name} has no value, because"
            f" {'the backbone lacks it' if method.pretrained else 'pretrained is False'}: draw it from the seed with"
            " common.freezing.freeze",
        )
