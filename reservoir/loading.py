"""Loads a trained translator."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common.arguments import check_texts, float_arg, int_arg
from common.config import check_int, check_number, parser_for
from common.data.corpus import TokenizedCorpus
from common.errors import check
from common.sharding import make_mesh
from common.storage.addresses import shown
from common.storage.folders import open_folder
from common.train.restore import snapshots
from common.train.task import ModelState
from reservoir import saved
from reservoir.tasks.translation import Translator, search_of

COUNTS = {
    "beams": "number of hypotheses per sentence (default: as configured in the run)",
    "batch_tokens": "source tokens per batch (default: as configured in the run)",
    "max_tokens": "maximum length of an input line in tokens (default 2048)",
    "average": "average the parameters of the newest N snapshots (default: the best checkpoint alone)",
    "average_best": "average the parameters of the N best checkpoints; the run must have kept N or more"
    " (--config.checkpoint.keep_best)",
}
"""Options that are integers of at least 1, and their help."""


def parser(program: str, description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the common options of reservoir.translate and reservoir.evaluate."""
    options = parser_for(program, description)
    options.add_argument(
        "--workdir", required=True, type=open_folder, metavar="RUN", help="folder of the run"
    )
    for name, text in COUNTS.items():
        options.add_argument(f"--{name}", type=int_arg(f"--{name}"), metavar="N", help=text)
    options.add_argument(
        "--length_penalty",
        type=float_arg("--length_penalty"),
        metavar="P",
        help="divide log-probabilities by (number of tokens)^P (default: as configured in the run)",
    )
    return options


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    """A trained translator with its configuration.

    Attributes:
      longest: maximum number of tokens of a line to translate.
      dashes: "--" if a command has loaded the run, for the option name in an error message; otherwise "".
    """

    config: ConfigDict
    mesh: Mesh
    values: ModelState
    translator: Translator
    longest: int
    dashes: str = ""

    def translate(self, lines: Sequence[str]) -> list[str]:
        """Returns one translation per line. A line without tokens, such as an empty line, gives an empty line.

        Raises:
          UserError: `lines` is a single text, a line has more than `longest` tokens, or `Translator.check_positions`
            fails.
        """
        lines = check_texts("lines", lines)
        encoded = self.translator.source_tokenizer.encode(lines)
        full = [number for number, tokens in enumerate(encoded) if tokens]
        for number in full:
            tokens = len(encoded[number])
            check(
                tokens <= self.longest,
                f"line {number + 1} of the text to translate has {tokens:,} tokens, more than"
                f" {self.dashes}max_tokens={self.longest}; split the line or set {self.dashes}max_tokens={tokens}"
                " (memory grows with the square of the length)",
            )
        result = [""] * len(lines)
        if full:
            corpus = TokenizedCorpus.from_lists([encoded[number] for number in full])
            with jax.set_mesh(self.mesh):
                translated = self.translator.translate_corpus(self.values, corpus)
            for number, line in zip(full, translated, strict=True):
                result[number] = line
        return result


def _newest(workdir: Path, count: int, option: str) -> list[int]:
    steps = snapshots(workdir)
    check(
        bool(steps),
        f"{option}={count}: {shown(workdir)} has no snapshots; leave out {option}, or train with"
        " --config.checkpoint.snapshots=N, which keeps a snapshot every N steps",
    )
    check(
        count <= len(steps),
        f"{option}={count} must be at most {len(steps)}, the number of snapshots in {shown(workdir)}",
    )
    return steps[-count:]


def load(options: argparse.Namespace) -> TrainedRun:
    """Calls `load_run` with the parsed options of `parser`."""
    values = {name: getattr(options, name) for name in (*COUNTS, "length_penalty")}
    given = {name: value for name, value in values.items() if value is not None}
    return load_run(options.workdir, **given, option="--workdir")


def load_run(
    folder: str | Path,
    *,
    beams: int | None = None,
    length_penalty: float | None = None,
    batch_tokens: int | None = None,
    max_tokens: int = 2048,
    average: int | None = None,
    average_best: int | None = None,
    mesh: Mesh | None = None,
    option: str = "folder",
) -> TrainedRun:
    """Loads a translator from its best checkpoint, or with parameters averaged over several checkpoints.

    The arguments are described in `parser`. `mesh` is by default a mesh of all devices. `option` names `folder` in
    error messages.

    Raises:
      UserError: an argument is invalid, the folder has no run, the run is not a translator, its configuration is
        invalid, or its tokenizers or checkpoints are missing, damaged or too few to average.
    """
    dashes = "--" * option.startswith("--")
    counts = beams, batch_tokens, max_tokens, average, average_best
    for name, count in zip(COUNTS, counts, strict=True):
        check_int(dashes + name, 1 if count is None else count)
    check_number(f"{dashes}length_penalty", length_penalty or 0)
    check(
        not (average and average_best),
        f"{dashes}average cannot be used with {dashes}average_best: leave out one of the two",
    )
    workdir = open_folder(folder)
    config = saved.read(workdir, option, "translation")
    if batch_tokens:
        config.eval.tokens_per_batch = batch_tokens
    overrides = {"beams": beams, "length_penalty": length_penalty}
    search = dataclasses.replace(
        search_of(config), **{k: v for k, v in overrides.items() if v is not None}
    )
    mesh = mesh or make_mesh({"data": -1})
    tokenizers, values = saved.load_translator(
        workdir,
        config,
        mesh,
        snapshots=_newest(workdir, average, f"{dashes}average") if average else (),
        best=average_best or 0,
    )
    translator = Translator(config, tokenizers, mesh, search)
    return TrainedRun(config, mesh, values, translator, max_tokens, dashes)
