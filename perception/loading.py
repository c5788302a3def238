"""Loads trained classifiers.

Shape letters of this module: B rows of a batch, E texts, C classes.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict
from scipy.special import expit, softmax

from common import sharding, variables
from common.cached import read_json_if
from common.config import complete
from common.errors import UserError, check, file_error, parse_json
from common.metrics.kinds import load as load_predictions
from common.metrics.predictions import PREDICTIONS
from common.sharding import make_mesh
from common.storage.addresses import shown
from common.track.tracker import SUMMARY
from common.train import frozen
from common.train.checkpoint import Checkpoints, model_arrays
from common.train.prefetch import put
from common.train.restore import load_run, read_config
from common.train.task import ModelState, PretrainedWeights
from common.train.workdir import ADDED, CONFIG
from perception import baseline, datasets, finetuning, hub
from perception.backbones import Backbone
from perception.finetuning import has_segments, make_model, make_shape
from perception.methods import find
from perception.pretrained import open_pretrained, pretrained_weights
from perception.run import validate_fields
from perception.subword import TOKENIZER, Subword
from perception.task import CLASSES, in_rows
from perception.task import logits as logits_of
from perception.windows import WindowBatch, Windows, batches

if TYPE_CHECKING:
    from perception.hugging_face import Pretrained

SHOWN_RUNS = 10
"""Maximum number of runs in an error message."""


@dataclass
class Trained:
    """A trained run: its best checkpoint, tokenizer and classes."""

    config: ConfigDict
    shape: Backbone
    tokenizer: Subword
    classes: tuple[str, ...]
    values: ModelState
    mesh: Mesh

    @cached_property
    def _compiled(self) -> Callable:
        abstract_model = self.values.abstract_model

        def logits(trainable, frozen, batch):
            return logits_of(abstract_model.build(trainable, frozen), batch)

        return jax.jit(logits, out_shardings=sharding.replicated(self.mesh))

    @cached_property
    def windows(self) -> Windows:
        """Function that splits texts into windows of at most `data.max_length` tokens."""
        return Windows(self.tokenizer, self.config.data.max_length)

    def probabilities(self, lines: Sequence[str], rows: int = 64) -> np.ndarray:
        """Returns class probabilities of each line, (E, C). Long lines are truncated as in training."""
        encoded = self.tokenizer.encode(lines, self.config.data.max_length)
        return self.probabilities_of([[ids] for ids in encoded], rows)

    def encode_pairs(
        self, pairs: Sequence[tuple[str, ...]]
    ) -> tuple[list[list[list[int]]], list[int], int]:
        """Returns the token ids of each pair, token counts of the first segments, and the number of truncated pairs.

        The token ids of a pair are one window. Pairs are truncated as in training (`Subword.encode_parts`). The token
        counts are [] if `finetuning.has_segments` is false. The entries of `pairs` may also be single texts.
        """
        rows, firsts, cut = self.tokenizer.encode_parts(pairs, self.config.data.max_length)
        segments = has_segments(self.config, self.shape)
        return [[ids] for ids in rows], firsts if segments else [], cut

    def probabilities_of(
        self,
        windows: Sequence[Sequence[list[int]]],
        rows: int = 64,
        firsts: Sequence[int] = (),
    ) -> np.ndarray:
        """Returns class probabilities of each text, (E, C), from the mean logits of its windows.

        Args:
          windows: token ids of the windows of each text.
          rows: maximum number of windows in a batch; see `windows.batches`.
          firsts: number of tokens in the first segment of each pair, for models with segments; otherwise ().
        """
        total_EC = np.zeros((len(windows), len(self.classes)))
        started = (
            (batch, self.logits(put(batch.inputs, self.mesh)))
            for batch in self.batches(windows, rows, firsts)
        )
        # `pairwise` starts the next batch before the logits of a batch are read, so the devices do not wait.
        for (batch, logits_BC), _ in pairwise(chain(started, [None])):
            np.add.at(total_EC, batch.texts_B, batch.weights_B[:, None] * np.asarray(logits_BC))
        return expit(total_EC) if self.config.data.multi_label else softmax(total_EC, axis=1)

    def batches(
        self,
        windows: Sequence[Sequence[list[int]]],
        rows: int = 64,
        firsts: Sequence[int] = (),
    ) -> Iterator[WindowBatch]:
        """Yields batches of all windows, padded to the same lengths as in training. See `probabilities_of`."""
        longest = self.config.data.max_length
        buckets = (*(n for n in in_rows(self.config).data.buckets if n < longest), longest)
        multiple = sharding.num_batch_shards(self.mesh)
        given = {"buckets": buckets, "rows": rows, "multiple": multiple, "pad": self.tokenizer.pad}
        return batches(windows, **given, firsts=firsts)

    def logits(self, inputs: Mapping[str, jax.Array]) -> jax.Array:
        """Returns logits (B, C) of a batch on the devices, without waiting for the computation."""
        with jax.set_mesh(self.mesh):
            return self._compiled(self.values.trainable, self.values.frozen, inputs)


def read(workdir: Path, option: str = "--workdir") -> ConfigDict:
    """Returns the configuration of a run; `option` is the command-line option that names `workdir`.

    Raises:
      UserError: `workdir` is not the directory of a run, or has a damaged configuration; or the run is a TF-IDF
        baseline or a run of another program.
    """
    check_is_run(workdir, option)
    check(
        baseline.read_config(workdir) is None,
        f"{option}={shown(workdir)} is a TF-IDF baseline, not a neural network: name the run of a network; to classify"
        " texts with the baseline, use perception.classify",
    )
    config = read_config(workdir, option, "perception")
    check(
        "finetune" in config,
        f"{option}={shown(workdir)} is a run of another program, not of perception; name a run of perception.train",
    )
    for field in ("balance", "multi_label", "pair", "shots"):  # older runs lack these fields
        config.data[field] = config.data.get(field, ADDED[f"data.{field}"])
    return config


def check_is_run(workdir: Path, option: str) -> None:
    """Raises a UserError if `workdir` is no run, but has runs in its folder `runs`, as perception.worth writes them."""
    folder = workdir / "runs"
    if (workdir / CONFIG).exists() or not folder.is_dir():
        return
    files = CONFIG, baseline.MODEL
    names = sorted(
        path.name for path in folder.iterdir() if any((path / file).is_file() for file in files)
    )
    if not names:
        return
    from common.report.runs import Run, read_run
    from perception.conclusions import best_run

    finished: dict[str, list[Run]] = {}
    for name in names:
        # Skip runs without test results, such as the runs that a sweep trains only to choose hyperparameters.
        if read_json_if(folder / name / SUMMARY, lambda found: bool(found["test"])) is not None:
            one = read_run(folder / name / SUMMARY)
            way = str(one.config.get("finetune", "tf_idf"))
            finished.setdefault(way, []).append(one)
    best = best_run(finished)[1].name if finished else ""
    advice = f"; the best run is {option}={shown(folder / best)}" if best else ""
    more = f" and {len(names) - SHOWN_RUNS:,} more" if len(names) > SHOWN_RUNS else ""
    raise UserError(
        f"{option}={shown(workdir)} is not a run, but contains runs: set {option} to one of them,"
        f" {', '.join(names[:SHOWN_RUNS])}{more} in {shown(folder)}{advice}"
    )


def read_classes(workdir: Path) -> tuple[str, ...]:
    """Returns the class names of a run. Raises a UserError if the file with these names is missing or damaged."""
    try:
        return tuple(parse_json((workdir / CLASSES).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise file_error(shown(workdir / CLASSES), error) from error


def read_thresholds(workdir: Path, config: ConfigDict) -> tuple[float, ...]:
    """Returns the class thresholds at a run's best step if a text may have several classes, otherwise ().

    Raises:
      UserError: the run's file of test predictions, which also stores the thresholds, is missing or damaged.
    """
    if not config.data.multi_label:
        return ()
    path = workdir / PREDICTIONS
    check(
        path.exists(),
        f"{shown(path)}, which stores the class thresholds, is missing: restore the file or, if the run was not tested,"
        " repeat its training command with --config.eval.test=true",
    )
    return load_predictions(path).thresholds


def begun_from(
    config: ConfigDict, weights: Path | None = None, option: str = "--pretrained"
) -> "Pretrained | None":
    """Opens the pretrained model of a run. Without `weights`, returns None if the checkpoint is enough to load the run.

    Args:
      weights: new directory of the pretrained model, which is also written to `config.pretrained`; None for the
        directory that the run used.
      option: command-line option that names `weights`, for error messages.

    Raises:
      UserError: the model is missing, damaged or not supported, or its backbone is not `config.backbone`; or `weights`
        is set, but the run started from random weights with a named backbone.
    """
    if not weights:
        if find(config.finetune).trains_all and config.backbone != "auto":
            # The checkpoint stores all parameters, and the name of the backbone determines the architecture.
            return None
        moved = f", but the run needs it: pass its new location as {option}=DIR"
        return open_pretrained(config, advice=moved, other=f"name the run's model with {option}")
    config.pretrained = str(hub.locate(weights, option))
    found = open_pretrained(config, option, other="name the model that the run used")
    check(
        found is not None,
        f"{option}={shown(weights)} is not used: the run started from random weights with"
        f" --config.backbone={config.backbone}; remove {option}",
    )
    return found


def _warn_if_unfinished(workdir: Path) -> None:
    if not (workdir / SUMMARY).exists():
        print(
            f"warning: {shown(workdir)} has no {SUMMARY}, so its training has not ended: its best checkpoint so far is"
            " used; repeat the training command to finish it",
            file=sys.stderr,
        )


def load(
    workdir: Path,
    mesh: Mesh | None = None,
    weights: Path | None = None,
    option: str = "--pretrained",
) -> Trained:
    """Loads the best checkpoint of a run. Prints a warning if the run has not ended.

    Args:
      weights: new directory of the pretrained weights; None for the directory that the run used.
      option: name of `weights` in error messages.

    Raises:
      UserError: `read` or `begun_from` fails, the configuration is invalid, a file of the run is missing or damaged, or
        the pretrained weights have changed.
    """
    config, mesh = read(workdir), mesh or make_mesh({"data": -1})
    _warn_if_unfinished(workdir)
    found, build, pretrained = _open(config, workdir, weights, option)
    values = load_run(workdir, config, build, mesh, pretrained_weights(pretrained, mesh))
    return Trained(config, *found, values, mesh)


def load_own(config: ConfigDict, workdir: Path, mesh: Mesh) -> tuple[Trained, str]:
    """Loads a run without the parameters that are frozen at pretrained weights.

    Also returns the fingerprint of these pretrained weights; "" if no frozen parameter comes from pretrained weights.
    Prints a warning if the run has not ended.

    Args:
      config: configuration of the run. `config.pretrained` may be another directory than in the run.

    Raises:
      UserError: `begun_from` fails, the configuration is invalid, or a file of the run is missing or damaged.
    """
    _warn_if_unfinished(workdir)
    found, build, _ = _open(config, workdir)
    model = variables.abstract(build)
    with closing(Checkpoints(workdir)) as checkpoints:
        arrays, meta = checkpoints.restore_best(model_arrays(model, mesh))
        pretrained = PretrainedWeights({}, meta.get("outside", ""))
        values = frozen.load(checkpoints, model, config.seed, pretrained, meta, mesh)
    state = ModelState(model, arrays["trainable"], values | arrays["frozen"], mesh)
    return Trained(config, *found, state, mesh), pretrained.fingerprint


def _open(
    config: ConfigDict, workdir: Path, weights: Path | None = None, option: str = "--pretrained"
) -> tuple[tuple[Backbone, Subword, tuple[str, ...]], Callable, "Pretrained | None"]:
    """Returns (backbone, tokenizer, classes), the function that builds the model, and the pretrained model."""
    with complete(shown(workdir / CONFIG)):
        datasets.validate(config)
        finetuning.validate(config)
    validate_fields(config)
    tokenizer, classes = Subword.load(workdir / TOKENIZER), read_classes(workdir)
    pretrained = begun_from(config, weights, option)
    shape = make_shape(config, pretrained, tokenizer.size)
    build = partial(make_model, config, shape, len(classes))
    return (shape, tokenizer, classes), lambda rngs: build(rngs=rngs), pretrained
