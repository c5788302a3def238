"""Builds the model and the tokenizer of a configuration, and checks its fields about model and fine-tuning."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from common import variables
from common.config import check_choice, check_rate
from common.data.labelled import LabelledText
from common.errors import check
from common.model.stack import REMAT
from common.model.transformer import compute_dtype
from common.storage.addresses import copy_of, shown
from common.variables import Frozen
from perception import options
from perception.backbones import BACKBONES, Backbone
from perception.methods import FINETUNE, find, words
from perception.model import POOLS, PooledClassifier, backbone
from perception.subword import TOKENIZER, Subword, build_subword

if TYPE_CHECKING:
    from perception.hugging_face import Pretrained

IN_BFLOAT16 = ("qwen2_1.5b", "openelm_3b", "phi_2", "mistral_7b")
"""Backbones that the authors' program computes in bfloat16. The program computes all other backbones in float32."""

TOKENIZERS = ("auto", "pretrained", "trained")
TABLES = ("embed/table", "embed/positions/table")
"""Names of the embedding tables of tokens and positions. If the shape of a table differs from the pretrained shape, the
authors' program reinitialises the table and does not train it under LoRA."""

ENCODER = "encoder/"


def validate(config: ConfigDict, weights: bool = True) -> None:
    """Checks the fields about model, fine-tuning and tokenizer, without opening the pretrained model.

    Adds missing options of all methods in `METHODS`, and of a user's method, to `config`, with their defaults.

    Args:
      weights: whether a run from pretrained weights requires --config.pretrained.

    Raises:
      UserError: a field has an invalid value, or needs or contradicts another field.
    """
    check_choice("--config.backbone", config.backbone, ("auto", *BACKBONES))
    options.add_to(config)
    check_choice("--config.pool", config.pool, POOLS)
    check_choice("--config.model.remat", config.model.remat, REMAT)
    if config.quantize != "none":
        from perception.quantized import KINDS

        check_choice("--config.quantize", config.quantize, ("none", *KINDS))
    check_choice(
        "--config.model.dtype", config.model.dtype, ("auto", "float32", "bfloat16", "authors")
    )
    if config.model.dropout != -1:
        check_rate("--config.model.dropout", config.model.dropout)
    method, option = find(config.finetune), f"{FINETUNE}={config.finetune}"
    check(
        not method.trains_all or config.quantize == "none",
        f"--config.quantize={config.quantize} needs frozen weights, but {option} trains all weights: set"
        f" --config.quantize=none, or choose a method with frozen weights, such as {FINETUNE}=lora",
    )
    options.validate(config)
    check_choice("--config.data.tokenizer", config.data.tokenizer, TOKENIZERS)
    for name in words(config.reinitialize):
        check_choice("--config.reinitialize", name, ("authors", *TABLES))
    check(
        not method.pretrained or bool(config.pretrained) or not weights,
        f"{option} needs pretrained weights: set --config.pretrained=DIR to a directory with config.json,"
        " tokenizer.json and safetensors or to a name on the Hugging Face hub, or use --config.finetune=full",
    )
    check(
        not method.pretrained or config.data.tokenizer != "trained",
        f"{option} uses the tokenizer of the pretrained model, but --config.data.tokenizer=trained is set: use"
        " --config.data.tokenizer=auto or --config.finetune=full",
    )
    for option, given, wanted in (
        ("--config.backbone", config.backbone, "auto"),
        ("--config.data.tokenizer", config.data.tokenizer, "pretrained"),
    ):
        check(
            bool(config.pretrained) or given != wanted,
            f"{option}={wanted} needs a pretrained model: set --config.pretrained=DIR, or another value of {option}",
        )


def check_used(config: ConfigDict) -> None:
    """Checks that a new run uses the model in --config.pretrained, if the option is set.

    Raises:
      UserError: the run uses neither the weights nor the architecture nor the tokenizer of the pretrained model.
    """
    check(
        not (config.pretrained and config.backbone != "auto" and trains_tokenizer(config)),
        f"--config.pretrained={config.pretrained} is not used, because {FINETUNE}={config.finetune} starts from random"
        f" weights: to start from the pretrained weights, set {FINETUNE} to lora, head or full_pretrained; to use only"
        " the architecture or the tokenizer of the model, set --config.backbone=auto or"
        " --config.data.tokenizer=pretrained; otherwise remove --config.pretrained",
    )


def reinitialized(config: ConfigDict, family: str) -> tuple[str, ...]:
    """Returns the embedding tables, as names in `TABLES`, that are initialised from the seed instead of loaded.

    "authors" in `config.reinitialize` means the tables that the authors' program reinitialises in backbones of this
    family (`Backbone.family`). Returns () if the method starts from random weights, because it loads no table.
    """
    authors = {"qwen2": TABLES[:1], "phi": TABLES[:1], "bert": TABLES[1:]}.get(family, ())
    names = [
        name
        for word in words(config.reinitialize)
        for name in (authors if word == "authors" else (word,))
    ]
    return tuple(dict.fromkeys(names)) if find(config.finetune).pretrained else ()


def uses_pretrained(config: ConfigDict) -> bool:
    """Returns whether the run takes its weights or its architecture from a pretrained model."""
    return find(config.finetune).pretrained or config.backbone == "auto"


def trains_tokenizer(config: ConfigDict) -> bool:
    """Returns whether a run trains a tokenizer instead of loading the tokenizer of the pretrained model."""
    return not find(config.finetune).pretrained and config.data.tokenizer != "pretrained"


def make_tokenizer(config: ConfigDict, train: LabelledText) -> Subword:
    """Loads the pretrained model's tokenizer, or trains a tokenizer on the training texts.

    Raises:
      UserError: the pretrained model is missing or has no valid tokenizer.json, `data.vocab_size` is too small, or the
        tokenizer in `data.cache_dir` is damaged or cannot be written.
    """
    if trains_tokenizer(config):
        lines = [text for parts in train.texts for text in parts]
        made = build_subword(config.data.vocab_size, lines, config.data.cache_dir)
        return made.separating_pairs() if config.data.pair else made
    from perception import hub

    path = hub.locate(copy_of(config.pretrained)) / TOKENIZER
    check(
        path.is_file(),
        f"--config.pretrained={shown(path.parent)} has no {TOKENIZER}: copy the model's {TOKENIZER} to this directory;"
        f" if the model is published without {TOKENIZER}, write the file with"
        " transformers.AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR), or for OpenELM copy the file of"
        " Llama 2",
    )
    return Subword.load(path)


def make_shape(config: ConfigDict, pretrained: "Pretrained | None", vocabulary: int) -> Backbone:
    """Returns the architecture of the run: the architecture of `pretrained`, or else the backbone `config.backbone`.

    Sets all dropout rates to `config.model.dropout`, unless it is -1. If the run starts from random weights, sets the
    vocabulary size to `vocabulary`. A table of positions that is not loaded gets at least `data.max_length`
    positions.

    Args:
      vocabulary: number of ids of the tokenizer.

    Raises:
      UserError: the tokenizer has more ids than the table of token embeddings has rows, or `data.max_length` exceeds
        the number of positions.
    """
    shape = pretrained.shape if pretrained else BACKBONES[config.backbone]
    longest, dropout_rate = config.data.max_length, config.model.dropout
    random = not find(config.finetune).pretrained
    if random:
        shape = replace(shape, vocabulary=vocabulary)
    check(
        vocabulary <= shape.vocabulary,
        f"the tokenizer of the run has {vocabulary:,} ids, but the embedding table of the model {config.pretrained} has"
        f" only {shape.vocabulary:,} rows: set --config.pretrained (for a finished run --pretrained) to a directory"
        " with the weights and the tokenizer.json of one model",
    )
    # If the table of position embeddings is initialised from the seed, enlarge it to `max_length`.
    if shape.learned and (random or TABLES[1] in reinitialized(config, shape.family)):
        shape = replace(shape, learned=max(longest + shape.first_position, shape.learned))
    most = shape.learned - shape.first_position if shape.learned else shape.longest
    check(
        longest <= most,
        f"--config.data.max_length={longest} exceeds the {most:,} positions of the model: set at most {most}, or use"
        " another model",
    )
    return replace(shape, dropout=(dropout_rate,) * 3) if dropout_rate != -1 else shape


def has_segments(config: ConfigDict, shape: Backbone) -> bool:
    """Returns whether the run classifies pairs and the model gives their two texts different token types."""
    return config.data.pair and shape.types > 1


def solves_head(config: ConfigDict) -> bool:
    """Returns whether the head is solved by logistic regression instead of trained in steps."""
    return find(config.finetune).solves_head and config.train.steps == 0


def resolve(config: ConfigDict) -> ConfigDict:
    """Returns a copy of `config` in which derived fields are set.

    - The dtype "authors" is replaced by the dtype in which the authors' program computes the backbone, or by "auto" if
      the backbone is "auto".
    - The learning rate 0 is replaced by `config.learning_rates[config.finetune]`. Without such an entry (a user's
      method), the learning rate becomes `Method.learning_rate`.
    - `learning_rates` is removed.
    - `eval.start` becomes True if the head is solved.

    Raises:
      UserError: the method is unknown, or its learning rate is not positive.
    """
    config = config.copy_and_resolve_references()
    if config.model.dtype == "authors":
        named = "bfloat16" if config.backbone in IN_BFLOAT16 else "float32"
        config.model.dtype = "auto" if config.backbone == "auto" else named
    if config.optimizer.learning_rate == 0:
        own = find(config.finetune).learning_rate
        learning_rate = config.learning_rates.get(config.finetune, own)
        option = f"--config.learning_rates.{config.finetune}"
        check(learning_rate > 0, f"{option} must be positive, got {learning_rate}")
        config.optimizer.learning_rate = learning_rate
    if "learning_rates" in config:
        with config.unlocked():
            del config.learning_rates
    if solves_head(config):
        config.eval.start = True
    return config


def cast_frozen(module: nnx.Module, dtype: jnp.dtype) -> None:
    """Casts the loaded `Frozen` matrices in `module` to `dtype`. Seed-initialised matrices stay in float32."""
    for _, part in list(nnx.iter_graph(module)):
        if isinstance(part, Frozen) and part.get_metadata("draw") is None and part.ndim == 2:
            part.set_value(part.get_value().astype(dtype))


def make_model(
    config: ConfigDict, shape: Backbone, classes: int, *, rngs: nnx.Rngs
) -> PooledClassifier:
    """Builds the model with its trainable and frozen parameters.

    Casts the loaded frozen matrices of the encoder to the dtype `config.model.dtype`. Quantizes the frozen kernels of
    the encoder to the format `config.quantize`, unless it is "none".

    Raises:
      UserError: a name in `config.lora.targets` matches no layer of the backbone, or the backbone lacks an embedding
        table that `config.reinitialize` names.
    """
    dtype = compute_dtype(config.model.dtype)
    encoder = backbone(shape, rngs=rngs, dtype=dtype, remat=config.model.remat)
    model = PooledClassifier(encoder, shape.width, classes, config.pool, rngs=rngs)
    method = find(config.finetune)
    if method.change:
        method.change(config, model, shape, rngs=rngs)
    deviation = shape.width**-0.5 if shape.scaled_init else 0.02
    for name in reinitialized(config, shape.family):
        part = encoder.embed if name == TABLES[0] else encoder.embed.positions
        check(
            part is not None,
            f"--config.reinitialize={config.reinitialize}: the backbone has no embedding table {name}; remove {name}",
        )
        # Trainable tables are initialised with the other parameters.
        if isinstance(part.table, Frozen):
            part.table.set_metadata(draw=("normal", deviation if name == TABLES[0] else 0.02))
    if not method.trains_all:
        cast_frozen(encoder, dtype)
        if config.quantize != "none":
            from perception.quantized import quantize_frozen

            quantize_frozen(encoder, config.quantize)
    return model


def encoder_parameters(shape: Backbone) -> Mapping[str, nnx.Variable]:
    """Returns {name: parameter without a value} of a backbone, without the prefix "encoder/"."""
    return variables.abstract(lambda rngs: backbone(shape, rngs=rngs)).trainable
