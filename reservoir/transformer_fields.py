"""Checks the fields of `config.model` that all transformers share."""

from ml_collections import ConfigDict

from common.config import check_choice, check_int, check_rate
from common.errors import check
from common.model.stack import REMAT

SIZES = ("width", "hidden", "heads", "layers", "encoder_layers", "decoder_layers", "max_length")


def check_transformer(model: ConfigDict) -> None:
    """Checks the fields of a transformer in `config.model`.

    The dropout rates and the fields in `SIZES`, except `width` and `heads`, may be missing.

    Raises:
      UserError: a field has an invalid value.
    """
    check_choice("--config.model.norm", model.norm, ("pre", "post"))
    check_choice("--config.model.remat", model.remat, REMAT)
    check_choice("--config.model.positions", model.positions, ("sinusoidal", "learned", "none"))
    check_choice("--config.model.activation", model.activation, ("relu", "gelu", "silu"))
    check_choice("--config.model.dtype", model.dtype, ("auto", "float32", "bfloat16"))
    for name in SIZES:
        if name in model:
            check_int(f"--config.model.{name}", model[name])
    check(
        model.width % model.heads == 0,
        f"--config.model.width={model.width} must be a multiple of --config.model.heads={model.heads}",
    )
    check(
        model.width % 2 == 0 or model.positions != "sinusoidal",
        f"--config.model.width={model.width} must be even for --config.model.positions=sinusoidal",
    )
    for name in ("dropout", "attention_dropout"):
        check_rate(f"--config.model.{name}", model.get(name, 0.0))
