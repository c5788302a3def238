"""Checks a user's method of fine-tuning, a `Method` from outside this project, before training."""

from ml_collections import ConfigDict

from common.errors import check
from common.tasks import user_method
from perception.backbones import Backbone
from perception.finetuning import ENCODER, encoder_parameters, make_model
from perception.head import BIAS, KERNEL
from perception.methods import FINETUNE, Method, find


def check_complete(config: ConfigDict, shape: Backbone, classes: int) -> None:
    """Checks a user's method by building the model and tracing a forward pass.

    Raises:
      UserError: `common.tasks.user_method.check_complete` finds an error, or a method with `adapters` starts from
        random weights or also trains parameters other than adapters and the head.
    """
    option, method = f"{FINETUNE}={config.finetune}", find(config.finetune)
    check(
        method.pretrained or not method.adapters,
        f"{option} has adapters=True, but pretrained=False: set pretrained=True, because adapters need pretrained"
        " weights",
    )
    config = config.copy_and_resolve_references()
    # The check looks for the names of the backbone's parameters, and quantization would rename the kernels.
    config.quantize = "none"
    model = user_method.check_complete(
        option,
        Method,
        lambda rngs: make_model(config, shape, classes, rngs=rngs),
        classes,
        {ENCODER + name: v.shape for name, v in encoder_parameters(shape).items()},
        "the backbone lacks it" if method.pretrained else "pretrained is False",
        loads=method.pretrained,
    )
    for name in model.trainable.keys() - {KERNEL, BIAS}:
        check(
            not method.adapters or "lora_" in name,
            f"{option} has adapters=True, but trains the parameter {name}, which is no adapter: freeze it, or set"
            " adapters=False",
        )
