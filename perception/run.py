"""Validates and prepares the training of a text classifier."""

from functools import partial
from pathlib import Path

from jax.sharding import Mesh
from ml_collections import ConfigDict

from common import variables
from common.cached import read_json_if
from common.config import check_choice, complete
from common.runtime.processes import is_main
from common.storage.addresses import shown
from common.track.tracker import SUMMARY
from common.train import loop
from common.train.finished import changed
from common.train.workdir import differences, has_checkpoints
from perception import datasets, finetuning, task
from perception.backbones import BACKBONES
from perception.datasets import DATASETS
from perception.finetuning import (
    has_segments,
    make_model,
    make_shape,
    make_tokenizer,
    resolve,
    uses_pretrained,
)
from perception.methods import METHODS
from perception.task import TextClassification


def validate(config: ConfigDict, read_data: bool = True) -> None:
    """Checks the configuration of a new run without opening pretrained weights or reading data.

    Args:
      read_data: False for a run that `launch.plan` compiles. Then the data are optional, and methods that start from
        pretrained weights do not need --config.pretrained.

    Raises:
      UserError: a field is missing or has an invalid value, or two fields contradict each other.
    """
    with complete("--config"):
        if read_data:
            datasets.validate(config)
        elif config.dataset:
            check_choice("--config.dataset", config.dataset, DATASETS)
        finetuning.validate(config, weights=read_data)
        finetuning.check_used(config)
    validate_fields(config)


def validate_fields(config: ConfigDict) -> None:
    """Raises a UserError for a missing or invalid field of batches, evaluation or the training loop.

    New runs (`validate`) and trained runs (`perception.loading`) share these checks.
    """
    with complete("--config"):
        check_choice("--config.eval.select", config.eval.select, ("valid", "test"))
        task.validate(config)
        loop.validate(resolve(config))


def prepare(
    config: ConfigDict, mesh: Mesh, read_data: bool = True
) -> tuple[ConfigDict, TextClassification]:
    """Returns the configuration for the training loop, and the task.

    Args:
      read_data: False builds a task without data, for `launch.plan`. In this case, methods that start from pretrained
        weights do not need --config.pretrained, and the model has two classes unless `config.dataset` is set. The
        vocabulary size is `data.vocab_size` if a run with data would train a tokenizer. Otherwise, it is the vocabulary
        size of the pretrained model or of the backbone.

    Raises:
      UserError: the configuration, the data or the pretrained model is invalid.
    """
    validate(config, read_data)
    config = resolve(config)
    kind, given = TextClassification, {}
    model = labelled = tokenizer = None
    if uses_pretrained(config) and (read_data or config.pretrained):
        from perception import pretrained

        model = pretrained.open_pretrained(config)
    if read_data:
        labelled = datasets.load(config)
        tokenizer = make_tokenizer(config, labelled[0]["train"])
        vocabulary, classes = tokenizer.size, len(labelled[1])
        given["pretrained"] = model
        if finetuning.solves_head(config):
            from perception.head import SolvedHead

            kind = SolvedHead
    else:
        vocabulary = model.shape.vocabulary if model else BACKBONES[config.backbone].vocabulary
        if finetuning.trains_tokenizer(config):
            vocabulary = config.data.vocab_size
        classes = DATASETS[config.dataset].classes if config.dataset else 2
    shape = make_shape(config, model, vocabulary)
    if config.finetune not in METHODS:
        from perception.user_method import check_complete

        check_complete(config, shape, classes)
    given |= {"classes": classes, "segments": has_segments(config, shape)}
    build = partial(make_model, config, shape)
    prepared = kind(config, tokenizer, build, mesh, labelled, **given)
    if config.lora.targets or config.reinitialize:
        # Build the model before any file is written, to raise errors about `lora.targets` and `reinitialize` early.
        variables.abstract(prepared.build)
    return config, prepared


def ended(config: ConfigDict, workdir: Path) -> dict | None:
    """Returns the summary of the run in `workdir` if it can be used again. Reads no data.

    Returns:
      The summary on process 0, {} on all other processes. None on all processes if the run has no checkpoints, if its
      summary is missing, damaged, or of another configuration or number of steps, if the summary lacks test results
      that `eval.test` requests, or if an input file is newer than the summary (`common.train.finished.changed`).

    Raises:
      UserError: the configuration is invalid.
    """
    validate(config)
    config, path = resolve(config), workdir / SUMMARY
    summary = read_json_if(
        path,
        lambda found: (
            found["steps"] == config.train.steps
            and not differences(found["config"], config)
            and (bool(found["test"]) or not config.eval.test)
            and has_checkpoints(workdir)
            and changed(config) < path.stat().st_mtime
        ),
    )
    if summary is not None and is_main():
        print(f"{shown(workdir)} is a finished run: reading its summary")
    return summary
