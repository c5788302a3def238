"""Checks a user's method of fine-tuning, a `Method` from outside this project, before training."""

from numbers import Integral

from ml_collections import ConfigDict

from common import variables
from common.errors import check
from common.tasks import user_method
from common.user_parts import user_code
from reservoir import encoder
from reservoir.layers import layers_of
from reservoir.methods import RESERVOIRS, Method, find
from reservoir.pretrained import Pretrained
from reservoir.tasks.masked_lm import vocabulary

CLASSES = 2
"""Number of classes of the checked model. The number of classes in the data is not known yet."""


def check_complete(config: ConfigDict, pretrained: Pretrained) -> None:
    """Checks a user's method by building the model and tracing a forward pass.

    Raises:
      UserError: the method does not fit the pretraining run, `frozen` fails or returns no number of layers, or
        `common.tasks.user_method.check_complete` finds an error.
    """
    option, method = f"{RESERVOIRS}={config.reservoirs}", find(config.reservoirs)
    layers = layers_of(pretrained.config)
    with user_code(option, Method, "config"):
        method.check(config, pretrained)
        frozen = method.frozen(config.to_dict(), layers)
    check(
        isinstance(frozen, Integral) and 0 <= frozen <= layers.total,
        f"{option}: frozen must return a number of layers, an int from 0 to {layers.total}, got {frozen!r}",
    )
    size = vocabulary(pretrained.tokenizer)
    before = variables.abstract(
        lambda rngs: encoder.encoder(config.model, size, rngs=rngs)
    ).shapes()
    user_method.check_complete(
        option,
        Method,
        lambda rngs: encoder.classifier(config, size, CLASSES, rngs=rngs),
        CLASSES,
        {f"encoder/{name}": x.shape for some in before for name, x in some.items()},
        "the pretraining run lacks it",
    )
