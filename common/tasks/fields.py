"""The fields of a configuration that all transformers share."""

from ml_collections import ConfigDict

from common.config import check_rate, choose, require

SIZES = ("width", "hidden", "heads", "layers", "encoder_layers", "decoder_layers", "max_length")


def check_transformer(model: ConfigDict) -> None:
    """Parts and sizes; which of the sizes there are depends on the task.

    Raises:
      UserError: one of them is at fault.
    """
    choose("--config.model.norm", model.norm, ("pre", "post"))
    choose("--config.model.positions", model.positions, ("sinusoidal", "learned", "none"))
    choose("--config.model.activation", model.activation, ("relu", "gelu", "silu"))
    choose("--config.model.dtype", model.dtype, ("auto", "float32", "bfloat16"))
    for name in SIZES:
        if name in model:
            require(
                model[name] >= 1, f"--config.model.{name} must be at least 1, got {model[name]}"
            )
    require(
        model.width % model.heads == 0,
        f"--config.model.width={model.width} is not divisible by --config.model.heads={model.heads}",
    )
    require(
        model.width % 2 == 0 or model.positions != "sinusoidal",
        f"--config.model.width={model.width}: sinusoidal positions need an even width",
    )
    for name in ("dropout", "attention_dropout"):
        check_rate(f"--config.model.{name}", model.get(name, 0.0))
