"""Loads a trained translator, as selected by command-line options."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common.arguments import float_arg, int_arg
from common.config import parser_for
from common.data.corpus import TokenizedCorpus
from common.errors import check
from common.sharding import make_mesh
from common.storage.addresses import shown
from common.storage.folders import open_folder
from common.train.restore import snapshots
from common.train.task import ModelState
from reservoir import saved
from reservoir.tasks.translation import Translator, search_of


def parser(program: str, description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the common options of reservoir.translate and reservoir.evaluate."""
    options = parser_for(program, description)
    options.add_argument(
        "--workdir", required=True, type=open_folder, metavar="RUN", help="folder of the run"
    )
    options.add_argument(
        "--beams",
        type=int_arg("--beams"),
        metavar="N",
        help="number of hypotheses per sentence (default: as configured in the run)",
    )
    options.add_argument(
        "--length_penalty",
        type=float_arg("--length_penalty"),
        metavar="P",
        help="divide log-probabilities by (number of tokens)^P (default: as configured in the run)",
    )
    options.add_argument(
        "--batch_tokens",
        type=int_arg("--batch_tokens"),
        metavar="N",
        help="source tokens per batch (default: as configured in the run)",
    )
    options.add_argument(
        "--max_tokens",
        type=int_arg("--max_tokens"),
        metavar="N",
        default=2048,
        help="maximum length of an input line in tokens (default 2048)",
    )
    options.add_argument(
        "--average",
        type=int_arg("--average"),
        metavar="N",
        help="average the parameters of the newest N snapshots (default: the best checkpoint alone)",
    )
    options.add_argument(
        "--average_best",
        type=int_arg("--average_best"),
        metavar="N",
        help="average the parameters of the N best checkpoints; the run must have kept N or more"
        " (--config.checkpoint.keep_best)",
    )
    return options


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    """A trained translator with its configuration.

    Attributes:
      longest: maximum number of tokens of a line to translate.
    """

    config: ConfigDict
    mesh: Mesh
    values: ModelState
    translator: Translator
    longest: int

    def translate(self, lines: Sequence[str]) -> list[str]:
        """Returns one translation per line. A line without tokens, such as an empty line, gives an empty line.

        Raises:
          UserError: a line has more than `longest` tokens, or `Translator.check_positions` fails.
        """
        encoded = self.translator.source_tokenizer.encode(lines)
        full = [number for number, tokens in enumerate(encoded) if tokens]
        for number in full:
            tokens = len(encoded[number])
            check(
                tokens <= self.longest,
                f"line {number + 1} of the text to translate has {tokens:,} tokens, more than"
                f" --max_tokens={self.longest}; split the line or set --max_tokens={tokens} (memory grows with the"
                " square of the length)",
            )
        result = [""] * len(lines)
        if full:
            corpus = TokenizedCorpus.from_lists([encoded[number] for number in full])
            with jax.set_mesh(self.mesh):
                translated = self.translator.translate_corpus(self.values, corpus)
            for number, line in zip(full, translated, strict=True):
                result[number] = line
        return result


def _newest(workdir: Path, count: int) -> list[int]:
    steps = snapshots(workdir)
    check(
        bool(steps),
        f"--average={count}: {shown(workdir)} has no snapshots; leave out --average, or train with"
        " --config.checkpoint.snapshots=N, which keeps a snapshot every N steps",
    )
    check(
        count <= len(steps),
        f"--average={count} must be at most {len(steps)}, the number of snapshots in {shown(workdir)}",
    )
    return steps[-count:]


def load(options: argparse.Namespace) -> TrainedRun:
    """Loads a translator from its best checkpoint, or with parameters averaged over several checkpoints.

    Beams, length penalty and batch tokens in `options`, the parsed options of `parser`, override the configuration.

    Raises:
      UserError: an option is invalid, the folder has no run, the run is not a translator, its configuration is invalid,
        or its tokenizers or checkpoints are missing, damaged or too few to average.
    """
    check(
        not (options.average and options.average_best),
        "--average cannot be used with --average_best: leave out one of the two options",
    )
    check(
        (options.length_penalty or 0) >= 0,
        f"--length_penalty must be at least 0, got {options.length_penalty}",
    )
    config = saved.read(options.workdir, "--workdir", "translation")
    if options.batch_tokens:
        config.eval.tokens_per_batch = options.batch_tokens
    overrides = {"beams": options.beams, "length_penalty": options.length_penalty}
    search = dataclasses.replace(
        search_of(config), **{k: v for k, v in overrides.items() if v is not None}
    )
    mesh = make_mesh({"data": -1})
    tokenizers, values = saved.load_translator(
        options.workdir,
        config,
        mesh,
        snapshots=_newest(options.workdir, options.average) if options.average else (),
        best=options.average_best or 0,
    )
    translator = Translator(config, tokenizers, mesh, search)
    return TrainedRun(config, mesh, values, translator, options.max_tokens)
