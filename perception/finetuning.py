"""How a backbone is fine-tuned: what of it is trained, where the rest comes from, and what reads its texts."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common.config import check, check_choice, check_rate
from common.data.labelled import LabelledText
from common.data.subword import Subword, build_subword
from common.model.transformer import compute_dtype
from common.train.task import NO_PRETRAINED_WEIGHTS, PretrainedWeights
from common.variables import AbstractModel, Frozen, Params, cast_frozen, freeze, freeze_given
from perception.backbones import BACKBONES, Backbone
from perception.hugging_face import TOKENIZER, Pretrained, check_shape, open_model
from perception.lora import Lora, adapt, is_target, linear_layers
from perception.model import POOLS, PooledClassifier, backbone
from perception.quantize import load
from perception.quantized import KINDS, quantize_frozen

FINETUNE = ("full", "full_pretrained", "lora", "head")
"""All weights from random ones; all weights from pretrained ones; adapters and head on pretrained ones; the head."""

TRAINS_ALL = FINETUNE[:2]
"""The ways whose encoder is trained and therefore in the checkpoints."""

QUANTIZE = ("none", *KINDS)
"""What becomes of frozen kernels of linear layers (QLoRA)."""

IN_BFLOAT16 = ("qwen2_1.5b", "openelm_3b", "phi_2", "mistral_7b")
"""The backbones that the authors' program computes in bfloat16; the others it computes in float32."""

TOKENIZERS = ("auto", "pretrained", "trained")
TABLES = ("embed/table", "embed/positions/table")
"""What the authors' program draws anew and leaves at random where its shape is not that of the pretrained model."""

ENCODER = "encoder/"


def validate(config: ConfigDict, weights: bool = True) -> None:
    """Backbone, adapters and where things come from, without looking there; `weights` says whether they have to."""
    check_choice("--config.backbone", config.backbone, ("auto", *BACKBONES))
    check_choice("--config.finetune", config.finetune, FINETUNE)
    check_choice("--config.pool", config.pool, POOLS)
    check_choice("--config.quantize", config.quantize, QUANTIZE)
    check_choice(
        "--config.model.dtype", config.model.dtype, ("auto", "float32", "bfloat16", "authors")
    )
    if config.model.dropout != -1:
        check_rate("--config.model.dropout", config.model.dropout)
    lora, option = config.lora, f"--config.finetune={config.finetune}"
    full = config.finetune == "full"
    check(
        config.finetune not in TRAINS_ALL or config.quantize == "none",
        f"--config.quantize={config.quantize} is of frozen weights; {option} trains them all",
    )
    check(lora.rank >= 1, f"--config.lora.rank must be at least 1, got {lora.rank}")
    check(
        lora.alpha >= 0,
        f"--config.lora.alpha must be above 0, or 0 for that of the rank, got {lora.alpha}",
    )
    check_rate("--config.lora.dropout", lora.dropout)
    check_choice("--config.data.tokenizer", config.data.tokenizer, TOKENIZERS)
    for name in _words(config.reinitialize):
        check_choice("--config.reinitialize", name, ("authors", *TABLES))
    check(
        full or bool(config.pretrained) or not weights,
        f"{option} begins with pretrained weights: --config.pretrained=DIR is missing, a folder with config.json,"
        " tokenizer.json and safetensors; without any there is --config.finetune=full",
    )
    check(
        full or config.data.tokenizer != "trained",
        f"{option} reads what its weights were trained on: --config.data.tokenizer=trained is for"
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
        f"{' and '.join(needed)} means that of --config.pretrained=DIR, which is missing",
    )


def check_used(config: ConfigDict) -> None:
    """That a folder which is named is for something. Of a run that is there already it does no harm.

    Raises:
      UserError: neither weights, nor shape, nor tokenizer would come from it.
    """
    named = config.backbone != "auto" and config.data.tokenizer != "pretrained"
    check(
        not (config.pretrained and config.finetune == "full" and named),
        f"--config.pretrained={config.pretrained} would not be used: --config.finetune=full begins with random weights;"
        " --config.backbone=auto takes its shape, --config.data.tokenizer=pretrained its tokenizer",
    )


def _words(text: str) -> list[str]:
    return text.replace(",", " ").split()


def reinitialized(config: ConfigDict, family: str) -> tuple[str, ...]:
    """Tables of a pretrained model that are drawn from the seed instead: those named, and for "authors" theirs
    (confounds b and c)."""
    theirs = {"qwen2": TABLES[:1], "phi": TABLES[:1], "bert": TABLES[1:]}.get(family, ())
    names = [
        name
        for one in _words(config.reinitialize)
        for name in (theirs if one == "authors" else (one,))
    ]
    return () if config.finetune == "full" else tuple(dict.fromkeys(names))


def open_pretrained(config: ConfigDict, advice: str = "") -> Pretrained | None:
    """The model that the run takes its weights or its shape from; a run in full may do without.

    Args:
      advice: for where its folder is not there.

    Raises:
      UserError: there is none, or it is not the backbone that is asked for.
    """
    if config.finetune == "full" and config.backbone != "auto":
        return None
    found = open_model(Path(config.pretrained), advice=advice)
    if config.backbone != "auto":
        check_shape(config.backbone, BACKBONES[config.backbone], found.shape)
    return found


def make_tokenizer(config: ConfigDict, train: LabelledText) -> Subword:
    """That of the pretrained model, or one trained on the training texts.

    Raises:
      UserError: the pretrained model has none.
    """
    if config.finetune == "full" and config.data.tokenizer != "pretrained":
        lines = [text for (text,) in train.texts]
        return build_subword(config.data.vocab_size, lines, config.data.cache_dir)
    path = Path(config.pretrained).expanduser() / TOKENIZER
    check(
        path.is_file(),
        f"{path.parent} has no {TOKENIZER}: put that of the model there (OpenELM's folders have none; it reads with"
        " that of Llama 2)",
    )
    return Subword.load(path)


def make_shape(config: ConfigDict, pretrained: Pretrained | None, vocabulary: int) -> Backbone:
    """The backbone with the positions of this run and, where all of it is trained, as many ids as its tokenizer has.

    Raises:
      UserError: the tokenizer or the rows do not fit into it.
    """
    shape = pretrained.shape if pretrained else BACKBONES[config.backbone]
    longest, rate = config.data.max_length, config.model.dropout
    full = config.finetune == "full"
    if full:
        shape = replace(shape, vocabulary=vocabulary)
    check(
        vocabulary <= shape.vocabulary,
        f"the tokenizer has {vocabulary:,} ids, the pretrained embeddings {shape.vocabulary:,} rows",
    )
    # Positions that are random anyway may be as many as the rows need.
    if shape.learned and (full or TABLES[1] in reinitialized(config, shape.family)):
        shape = replace(shape, learned=max(longest, shape.learned))
    most = shape.learned or shape.longest
    check(
        longest <= most,
        f"--config.data.max_length={longest} is longer than the {most:,} positions of the model",
    )
    return replace(shape, dropout=(rate,) * 3) if rate != -1 else shape


def solves_head(config: ConfigDict) -> bool:
    """Whether the run is the optimum of the head: no step trains it."""
    return config.finetune == "head" and config.train.steps == 0


def resolve(config: ConfigDict) -> ConfigDict:
    """A copy with the values that the other fields imply.

    The computation type "authors" becomes the type of their program for a named backbone, otherwise "auto". A learning
    rate of 0 becomes the one of `config.finetune` in `config.learning_rates`, which the copy lacks: what a run stores
    is the learning rate that it was trained with. A head without steps is solved for, and evaluated at its start.
    """
    config = config.copy_and_resolve_references()
    if config.model.dtype == "authors":
        named = "bfloat16" if config.backbone in IN_BFLOAT16 else "float32"
        config.model.dtype = "auto" if config.backbone == "auto" else named
    if config.optimizer.learning_rate == 0:
        rate = config.learning_rates[config.finetune]
        option = f"--config.learning_rates.{config.finetune}"
        check(rate > 0, f"{option} must be above 0, got {rate}")
        config.optimizer.learning_rate = rate
    if "learning_rates" in config:
        del config.learning_rates
    if solves_head(config):
        config.eval.start = True
    return config


def make_lora(config: ConfigDict) -> Lora:
    lora = config.lora
    return Lora(lora.rank, lora.alpha or lora.rank, lora.dropout, lora.stabilized)


def make_model(
    config: ConfigDict, shape: Backbone, classes: int, *, rngs: nnx.Rngs
) -> PooledClassifier:
    """The whole model: what is trained, and what stays frozen, at pretrained values or at random ones from the seed.

    `config.freeze_head` is about LoRA alone, where the authors' program leaves the head as it was drawn.

    Raises:
      UserError: there is nothing that `config.lora.targets` or `config.reinitialize` could be about.
    """
    dtype = compute_dtype(config.model.dtype)
    encoder = backbone(shape, rngs=rngs, dtype=dtype, remat=config.model.remat)
    made = PooledClassifier(encoder, shape.width, classes, config.pool, rngs=rngs)
    if config.finetune == "lora":
        targets, layers = _words(config.lora.targets) or shape.targets, linear_layers(encoder)
        for target in targets:
            check(
                any(is_target(path, target) for path in layers),
                f"--config.lora.targets: {target!r} names no layer; there are, in this backbone:"
                f" {', '.join(dict.fromkeys(path[-1] for path in layers))}",
            )
        adapt(encoder, targets, make_lora(config), rngs=rngs)
    elif config.finetune == "head":
        freeze_given(encoder)
    deviation = shape.width**-0.5 if shape.scaled_init else 0.02
    for name in reinitialized(config, shape.family):
        part = encoder.embed if name == TABLES[0] else encoder.embed.positions
        check(part is not None, f"--config.reinitialize={name}: this backbone has no such table")
        if isinstance(part.table, Frozen):  # a trained one is drawn with all that is trained
            part.table.set_metadata(draw=("normal", deviation if name == TABLES[0] else 0.02))
    cast_frozen(encoder, dtype)
    if config.quantize != "none":
        quantize_frozen(encoder, config.quantize)
    if config.finetune == "lora" and config.freeze_head:
        freeze(made.head)
        for variable in (made.head.kernel, made.head.bias):
            variable.set_metadata(draw=("uniform", (2 * shape.width) ** -0.5))
    return made


def start(config: ConfigDict, pretrained: Pretrained | None) -> Callable[[Params], Params]:
    """`Task.start` of a run: with `full_pretrained` the encoder begins at the pretrained values, except the tables that
    `config.reinitialize` names; every other run begins at random values."""

    def read(trainable: Params) -> Params:
        if config.finetune != "full_pretrained":
            return trainable
        drawn = reinitialized(config, pretrained.shape.family)
        wanted = {
            name.removeprefix(ENCODER): jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            for name, x in trainable.items()
            if name.startswith(ENCODER) and name.removeprefix(ENCODER) not in drawn
        }
        return {**trainable, **{ENCODER + n: x for n, x in pretrained.load(wanted).items()}}

    return read


def outside(
    pretrained: Pretrained | None, mesh: Mesh
) -> Callable[[AbstractModel], PretrainedWeights]:
    """The frozen values that the folder of a pretrained model holds."""

    def read(abstract_model: AbstractModel) -> PretrainedWeights:
        given = {n: v for n, v in abstract_model.frozen.items() if n not in abstract_model.drawn}
        if not given:
            return NO_PRETRAINED_WEIGHTS
        frozen = {n.removeprefix(ENCODER): v for n, v in given.items()}
        values = load(pretrained.load, frozen, mesh)
        return PretrainedWeights(
            {ENCODER + n: x for n, x in values.items()}, pretrained.fingerprint
        )

    return read
