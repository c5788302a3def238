"""Fine-tuning: which parameters are trained, where frozen parameters come from, and which tokenizer is used."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common.config import check_choice, check_rate
from common.data.labelled import LabelledText
from common.errors import check
from common.model.stack import REMAT
from common.model.transformer import compute_dtype
from common.runtime.processes import check_agreement
from common.storage.addresses import copy_of
from common.storage.folders import open_folder
from common.train.task import NO_PRETRAINED_WEIGHTS, PretrainedWeights
from common.variables import AbstractModel, Frozen, Params
from perception.backbones import BACKBONES, Backbone
from perception.model import POOLS, PooledClassifier, backbone
from perception.subword import Subword, build_subword

if TYPE_CHECKING:
    from common.model.low_rank import Lora
    from perception.hugging_face import Pretrained

FINETUNE = ("full", "full_pretrained", "lora", "head")
"""Training methods. "full": all weights, from random initialization. "full_pretrained": all weights, from pretrained
weights. "lora": adapters and the head. "head": only the head."""

TRAINS_ALL = FINETUNE[:2]
"""Values of `finetune` that train the encoder and store it in checkpoints."""

IN_BFLOAT16 = ("qwen2_1.5b", "openelm_3b", "phi_2", "mistral_7b")
"""Backbones that the authors' program computes in bfloat16, not in float32 like all other backbones."""

TOKENIZERS = ("auto", "pretrained", "trained")
TABLES = ("embed/table", "embed/positions/table")
"""Names of the embedding tables of tokens and positions. If the shape of a table differs from the pretrained shape, the
authors' program reinitialises the table and does not train it under LoRA."""

ENCODER = "encoder/"


def validate(config: ConfigDict, weights: bool = True) -> None:
    """Checks the fields of backbone, adapters, pretrained weights and tokenizer without opening files.

    Args:
      weights: whether a run from pretrained weights requires --config.pretrained.

    Raises:
      UserError: a field has an invalid value, or two fields contradict each other.
    """
    check_choice("--config.backbone", config.backbone, ("auto", *BACKBONES))
    check_choice("--config.finetune", config.finetune, FINETUNE)
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
    lora, option = config.lora, f"--config.finetune={config.finetune}"
    full = config.finetune == "full"
    check(
        config.finetune not in TRAINS_ALL or config.quantize == "none",
        f"--config.quantize={config.quantize} needs frozen weights, but {option} trains all weights",
    )
    check(lora.rank >= 1, f"--config.lora.rank must be at least 1, got {lora.rank}")
    check(
        lora.alpha >= 0,
        f"--config.lora.alpha must be positive, or 0 to use the rank, got {lora.alpha}",
    )
    check_rate("--config.lora.dropout", lora.dropout)
    check_choice("--config.data.tokenizer", config.data.tokenizer, TOKENIZERS)
    for name in _words(config.reinitialize):
        check_choice("--config.reinitialize", name, ("authors", *TABLES))
    check(
        full or bool(config.pretrained) or not weights,
        f"{option} needs pretrained weights: set --config.pretrained=DIR to a directory with config.json,"
        " tokenizer.json and safetensors or to a name on the Hugging Face hub, or use --config.finetune=full",
    )
    check(
        full or config.data.tokenizer != "trained",
        f"{option} uses the tokenizer of the pretrained model: --config.data.tokenizer=trained needs"
        " --config.finetune=full",
    )
    needed = [
        f"--config.{field}={value}"
        for field, value, wanted in (
            ("backbone", config.backbone, "auto"),
            ("data.tokenizer", config.data.tokenizer, "pretrained"),
        )
        if value == wanted
    ]
    check(
        bool(config.pretrained) or not needed,
        f"{' and '.join(needed)} need{'s' * (len(needed) == 1)} --config.pretrained=DIR, which is not set",
    )


def check_used(config: ConfigDict) -> None:
    """Checks that a new run uses the model in --config.pretrained, if the option is set.

    Raises:
      UserError: the run uses neither the weights nor the architecture nor the tokenizer of the pretrained model.
    """
    named = config.backbone != "auto" and config.data.tokenizer != "pretrained"
    check(
        not (config.pretrained and config.finetune == "full" and named),
        f"--config.pretrained={config.pretrained} is not used, because --config.finetune=full starts from random"
        " weights: remove --config.pretrained, or use the architecture (--config.backbone=auto) or the tokenizer"
        " (--config.data.tokenizer=pretrained) of the model",
    )


def _words(text: str) -> list[str]:
    return text.replace(",", " ").split()


def reinitialized(config: ConfigDict, family: str) -> tuple[str, ...]:
    """Returns the embedding tables, as names in `TABLES`, that are initialised from the seed instead of loaded.

    "authors" in `config.reinitialize` means the embedding tables that the authors' program reinitialises in backbones
    of this family (`Backbone.family`).
    """
    authors = {"qwen2": TABLES[:1], "phi": TABLES[:1], "bert": TABLES[1:]}.get(family, ())
    names = [
        name
        for word in _words(config.reinitialize)
        for name in (authors if word == "authors" else (word,))
    ]
    return () if config.finetune == "full" else tuple(dict.fromkeys(names))


def open_pretrained(config: ConfigDict, advice: str = "") -> "Pretrained | None":
    """Opens the pretrained model that gives the run its weights or architecture.

    Returns None for full training of a named backbone, which needs neither.

    Args:
      advice: text appended to the error if the directory does not exist.

    Raises:
      UserError: the directory does not exist, or contains another backbone than `config.backbone`.
    """
    if config.finetune == "full" and config.backbone != "auto":
        return None
    from perception.hugging_face import check_shape, open_model

    found = open_model(open_folder(config.pretrained), advice=advice)
    if config.backbone != "auto":
        check_shape(config.backbone, BACKBONES[config.backbone], found.shape)
    return found


def make_tokenizer(config: ConfigDict, train: LabelledText) -> Subword:
    """Loads the pretrained model's tokenizer, or trains a tokenizer on the training texts.

    A tokenizer is trained only for full training, unless `config.data.tokenizer` is "pretrained".

    Raises:
      UserError: the pretrained model has no tokenizer.json.
    """
    if config.finetune == "full" and config.data.tokenizer != "pretrained":
        lines = [text for parts in train.texts for text in parts]
        made = build_subword(config.data.vocab_size, lines, config.data.cache_dir)
        return made.separating_pairs() if config.data.pair else made
    from perception import hub
    from perception.hugging_face import TOKENIZER

    path = hub.locate(copy_of(config.pretrained)) / TOKENIZER
    check(
        path.is_file(),
        f"{path.parent} has no {TOKENIZER}: copy the model's {TOKENIZER} to this directory"
        " (OpenELM uses the tokenizer of Llama 2)",
    )
    return Subword.load(path)


def make_shape(config: ConfigDict, pretrained: "Pretrained | None", vocabulary: int) -> Backbone:
    """Returns the backbone with the run's number of positions, dropout rate and, for full training, vocabulary.

    Raises:
      UserError: the tokenizer has more ids than the embedding table has rows, or `data.max_length` exceeds the
        positions.
    """
    shape = pretrained.shape if pretrained else BACKBONES[config.backbone]
    longest, dropout_rate = config.data.max_length, config.model.dropout
    full = config.finetune == "full"
    if full:
        shape = replace(shape, vocabulary=vocabulary)
    check(
        vocabulary <= shape.vocabulary,
        f"the tokenizer has {vocabulary:,} ids, but the pretrained embedding table has {shape.vocabulary:,} rows:"
        " use the model's own tokenizer.json",
    )
    # If the table of position embeddings is initialised from the seed, enlarge it to `max_length`.
    if shape.learned and (full or TABLES[1] in reinitialized(config, shape.family)):
        shape = replace(shape, learned=max(longest + shape.first_position, shape.learned))
    most = shape.learned - shape.first_position if shape.learned else shape.longest
    check(
        longest <= most,
        f"--config.data.max_length={longest} exceeds the {most:,} positions of the model",
    )
    return replace(shape, dropout=(dropout_rate,) * 3) if dropout_rate != -1 else shape


def has_segments(config: ConfigDict, shape: Backbone) -> bool:
    """Returns whether the model gives different token types to the first and the second text of a pair."""
    return config.data.pair and shape.types > 1


def solves_head(config: ConfigDict) -> bool:
    """Returns whether the head is solved by logistic regression instead of trained in steps."""
    return config.finetune == "head" and config.train.steps == 0


def resolve(config: ConfigDict) -> ConfigDict:
    """Returns a copy of `config` in which derived fields are set.

    The dtype "authors" is replaced by the dtype in which the authors' program computes the backbone, or by "auto" for
    the backbone "auto". The learning rate 0 is replaced by `config.learning_rates[config.finetune]`, and
    `learning_rates` is removed. If the head is solved, `eval.start` is set.
    """
    config = config.copy_and_resolve_references()
    if config.model.dtype == "authors":
        named = "bfloat16" if config.backbone in IN_BFLOAT16 else "float32"
        config.model.dtype = "auto" if config.backbone == "auto" else named
    if config.optimizer.learning_rate == 0:
        learning_rate = config.learning_rates[config.finetune]
        option = f"--config.learning_rates.{config.finetune}"
        check(learning_rate > 0, f"{option} must be positive, got {learning_rate}")
        config.optimizer.learning_rate = learning_rate
    if "learning_rates" in config:
        del config.learning_rates
    if solves_head(config):
        config.eval.start = True
    return config


def make_lora(config: ConfigDict) -> "Lora":
    from common.model.low_rank import Lora

    lora = config.lora
    return Lora(lora.rank, lora.alpha or lora.rank, lora.dropout, lora.stabilized)


def make_model(
    config: ConfigDict, shape: Backbone, classes: int, *, rngs: nnx.Rngs
) -> PooledClassifier:
    """Builds the model with its trainable and frozen parameters.

    With LoRA, `config.freeze_head` freezes the head at its initial values, like the authors' program.

    Raises:
      UserError: the backbone has no layer named in `config.lora.targets`, or no embedding table named in
        `config.reinitialize`.
    """
    dtype = compute_dtype(config.model.dtype)
    encoder = backbone(shape, rngs=rngs, dtype=dtype, remat=config.model.remat)
    model = PooledClassifier(encoder, shape.width, classes, config.pool, rngs=rngs)
    if config.finetune == "lora":
        _add_adapters(config, encoder, shape, rngs)
    elif config.finetune == "head":
        from common.freezing import freeze_given

        freeze_given(encoder)
    deviation = shape.width**-0.5 if shape.scaled_init else 0.02
    for name in reinitialized(config, shape.family):
        part = encoder.embed if name == TABLES[0] else encoder.embed.positions
        check(
            part is not None,
            f"--config.reinitialize={name}: this backbone does not have this embedding table",
        )
        if isinstance(
            part.table, Frozen
        ):  # trainable tables are initialised with the other parameters
            part.table.set_metadata(draw=("normal", deviation if name == TABLES[0] else 0.02))
    if config.finetune not in TRAINS_ALL:
        _finish_frozen(config, model, shape, dtype)
    return model


def _finish_frozen(
    config: ConfigDict, model: PooledClassifier, shape: Backbone, dtype: jnp.dtype
) -> None:
    """Casts or quantizes the frozen parameters. With LoRA and `config.freeze_head`, also freezes the head."""
    from common.freezing import cast_frozen, freeze

    cast_frozen(model.encoder, dtype)
    if config.quantize != "none":
        from perception.quantized import quantize_frozen

        quantize_frozen(model.encoder, config.quantize)
    if config.finetune == "lora" and config.freeze_head:
        freeze(model.head)
        for variable in (model.head.kernel, model.head.bias):
            variable.set_metadata(draw=("uniform", (2 * shape.width) ** -0.5))


def _add_adapters(config: ConfigDict, encoder: nnx.Module, shape: Backbone, rngs: nnx.Rngs) -> None:
    """Adds LoRA adapters to the layers `config.lora.targets`; "" means the backbone's `targets`.

    Raises:
      UserError: a target matches no layer.
    """
    from common.model.low_rank import adapt, is_target, linear_layers

    targets, layers = _words(config.lora.targets) or shape.targets, linear_layers(encoder)
    for target in targets:
        check(
            any(is_target(path, target) for path in layers),
            f"--config.lora.targets: {target!r} matches no layer of this backbone; its layers are"
            f" {', '.join(dict.fromkeys(path[-1] for path in layers))}",
        )
    adapt(encoder, targets, make_lora(config), rngs=rngs)


def start(
    config: ConfigDict, pretrained: "Pretrained | None"
) -> Callable[[Params, Params], Params]:
    """Returns the implementation of `Task.start`.

    For the method "full_pretrained", the returned function loads the encoder, except reinitialised embedding tables,
    from the pretrained model. For the other methods, it returns its first argument.
    """

    def read(trainable: Params, frozen: Params) -> Params:
        del frozen
        if config.finetune != "full_pretrained":
            return trainable
        check_agreement(
            lambda: {"the fingerprint of the pretrained weights": pretrained.fingerprint[:16]}
        )
        drawn = reinitialized(config, pretrained.shape.family)
        wanted = {
            name.removeprefix(ENCODER): jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            for name, x in trainable.items()
            if name.startswith(ENCODER) and name.removeprefix(ENCODER) not in drawn
        }
        return {**trainable, **{ENCODER + n: x for n, x in pretrained.load(wanted).items()}}

    return read


def outside(
    pretrained: "Pretrained | None", mesh: Mesh
) -> Callable[[AbstractModel], PretrainedWeights]:
    """Returns the implementation of `Task.outside`.

    The returned function reads the frozen parameters from the pretrained model's files, except the frozen parameters
    that are initialised from the seed.
    """

    def read(abstract_model: AbstractModel) -> PretrainedWeights:
        drawn = abstract_model.drawn
        frozen = {
            n.removeprefix(ENCODER): v for n, v in abstract_model.frozen.items() if n not in drawn
        }
        if not frozen:
            return NO_PRETRAINED_WEIGHTS
        from perception.quantized import load_frozen

        values = load_frozen(pretrained.load, frozen, mesh)
        return PretrainedWeights(
            {ENCODER + n: x for n, x in values.items()}, pretrained.fingerprint
        )

    return read
