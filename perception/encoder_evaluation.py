"""Evaluates a trained classifier with a modified encoder, such as quantized weights or weights plus task vectors."""

import sys
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path

import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common.arguments import check_folder, int_arg
from common.config import override_all, split_fields
from common.errors import check
from common.metrics.classes import Classes
from common.sharding import make_mesh
from common.storage.addresses import shown
from common.storage.folders import open_folder
from common.variables import Params
from perception import datasets, hub, loading
from perception.finetuning import ENCODER
from perception.methods import METHODS, find


def parse(parser: ArgumentParser, tables: str) -> tuple[Namespace, Mesh]:
    """Adds the options --pretrained, --examples and --out, and parses the command line. Returns options and mesh.

    Args:
      tables: description of the files that the program writes to --out, for the help text.
    """
    parser.add_argument(
        "--pretrained",
        type=open_folder,
        metavar="DIR",
        help="the pretrained model of the runs (default: the model in their --config.pretrained)",
    )
    parser.add_argument(
        "--examples",
        type=int_arg("--examples"),
        metavar="N",
        help="evaluate only the first N examples of each split (default: all)",
    )
    parser.add_argument(
        "--out",
        type=open_folder,
        default=Path("runs/perception"),
        metavar="DIR",
        help=f"directory for {tables} (default: runs/perception)",
    )
    parser.epilog = "Further options: --config.mesh.*"
    fields, rest = split_fields(sys.argv[1:])
    options = parser.parse_args(rest)
    check_folder("--out", options.out)
    settings = ConfigDict({"mesh": {"data": -1, "fsdp": 1, "tensor": 1}})
    override_all(settings, fields)
    return options, make_mesh(settings.mesh)


class EncoderEvaluation:
    """Classifies the examples of a run with the run's head and tokenizer and a given encoder. Computes in float32.

    Attributes:
      encoder: name without the prefix "encoder/" -> parameter of the run's encoder, float32.
      shape: the encoder's backbone.
      fingerprint: fingerprint of the whole test split, even if only some of its examples are evaluated.
    """

    def __init__(
        self,
        workdir: Path,
        mesh: Mesh,
        examples: int | None = None,
        pretrained: Path | None = None,
    ):
        """Loads a run that trained all weights, and its data.

        Args:
          examples: number of examples at the start of each split that are evaluated; None evaluates all examples.
          pretrained: new directory of the run's pretrained model; None for the directory that the run used.

        Raises:
          UserError: `workdir` contains no run of a network; the run did not train all weights, or has several classes
            per text; or its files, pretrained model or data are missing, damaged or changed.
        """
        config = loading.read(workdir, "--runs")
        complete = [name for name, method in METHODS.items() if method.trains_all]
        check(
            find(config.finetune).trains_all,
            f"--runs {shown(workdir)} did not train all weights (--config.finetune={config.finetune}): name a run with"
            f" --config.finetune={' or '.join(complete)}",
        )
        check(
            not config.data.multi_label,
            f"--runs {shown(workdir)} has several classes per text (--config.data.multi_label), which is not supported:"
            " name a run with one class per text",
        )
        config.model.dtype = "float32"
        if pretrained:
            config.pretrained = str(hub.locate(pretrained, "--pretrained"))
        self._trained, _ = loading.load_own(config, workdir, mesh)
        self._splits, classes = datasets.load(config)
        check(
            classes == self._trained.classes,
            f"--runs {shown(workdir)} has the classes {', '.join(self._trained.classes)}, but its data have"
            f" {', '.join(classes)}: restore the data of the run",
        )
        self._examples = examples
        self.fingerprint = self._splits["test"].fingerprint
        values = self._trained.values.trainable
        self.encoder = {
            n.removeprefix(ENCODER): x for n, x in values.items() if n.startswith(ENCODER)
        }
        self.shape = self._trained.shape

    def __call__(self, encoder: Params, split: str) -> Classes:
        """Returns the predictions for the evaluated examples of a split, with the encoder parameters `encoder`."""
        values = self._trained.values
        whole = values.trainable | {ENCODER + name: x for name, x in encoder.items()}
        self._trained.values = replace(values, trainable=whole)
        text = self._splits[split]
        labels_E = text.labels_E[: self._examples]
        windows, firsts, _ = self._trained.encode_pairs(text.texts[: self._examples])
        probabilities_EC = self._trained.probabilities_of(windows, firsts=firsts)
        logs_EC = np.log(np.maximum(probabilities_EC, np.finfo(np.float32).tiny))
        return Classes.of_log_probabilities(
            text.fingerprint, labels_E, logs_EC, self._trained.classes
        )
