"""Classifies texts with a trained run: python -m perception.classify --run=RUN --input=new.csv --output=FILE.csv

The run is a network, or the TF-IDF model of perception.worth. --input is a table (.csv, .tsv, .jsonl or .parquet) or
lines of text (.txt), plain or .gz. Without --input, reads lines of text from standard input. Without --output, writes
to standard output.

A table gets new columns: the most probable class, its probability, and the probability of every class. If a text may
have several classes, the new columns are the list of classes that reach their thresholds, and the probability of every
class. --text names the columns with texts, and --label the first new column (default: the names in training).

For each line of text, writes one line with class names and probabilities, separated by tabs, most probable class first.
If a text may have several classes, writes only classes that reach their thresholds. If the run was trained on pairs, an
input line has two texts, separated by a tab.

--top=K writes the K most probable classes and their probabilities instead, to a table or to lines.

--config.mesh.data, .fsdp and .tensor set the mesh. By default the rows of a batch are split over all devices.
"""

import sys
from argparse import Action, ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from ml_collections import ConfigDict

from common.errors import UserError
from common.runtime import program

if TYPE_CHECKING:
    from perception.text_tables import Fields

BLOCK = 4096
"""Number of rows of --input that are read at once. A network has the batch size --batch."""


class _Run(Action):
    """Stores the value as `run`, and the option that was given (--run or --workdir) as `option`, for messages."""

    def __call__(
        self, parser: ArgumentParser, options: Namespace, value: Path, option: str | None = None
    ) -> None:
        options.run, options.option = value, option


def _parser() -> ArgumentParser:
    from common.arguments import int_arg
    from common.config import parser_for
    from common.storage.folders import open_file, open_folder

    parser = parser_for("perception.classify", __doc__)
    folder, file = {"type": open_folder, "metavar": "DIR"}, {"type": open_file, "metavar": "FILE"}
    parser.add_argument(
        "--run", "--workdir", required=True, action=_Run, **folder, help="directory of the run"
    )
    parser.add_argument(
        "--pretrained",
        **folder,
        help="pretrained weights (default: the directory that the run used)",
    )
    parser.add_argument(
        "--input",
        **file,
        help=".csv, .tsv, .jsonl, .parquet or .txt, each optionally followed by .gz (default: lines of standard"
        " input)",
    )
    parser.add_argument(
        "--text",
        action="append",
        default=[],
        metavar="COLUMN",
        help="text column of --input; repeat the option for several columns (default: as in training)",
    )
    parser.add_argument(
        "--label",
        default="",
        metavar="COLUMN",
        help="name of the first added column, which has the labels (default: as in training)",
    )
    parser.add_argument(
        "--encoding",
        default="",
        help="encoding of the input, such as cp1252 (default: UTF-8, or UTF-16 with a byte order mark)",
    )
    parser.add_argument(
        "--output",
        **file,
        help="file with the same extension as --input, written atomically (default: standard output)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing --output")
    parser.add_argument(
        "--top",
        type=int_arg("--top"),
        metavar="K",
        help="write only the K most probable classes, with their probabilities",
    )
    parser.add_argument(
        "--batch", type=int_arg("--batch"), default=64, metavar="N", help="batch size (default: 64)"
    )
    parser.epilog = "Further options: --config.mesh.*"
    return parser


def _check_output(options: Namespace) -> None:
    from common.arguments import check_output
    from common.errors import check
    from common.storage.addresses import shown
    from perception.text_tables import ending

    output, given = options.output, options.input
    wanted, why = ".txt", "because the texts come from standard input"
    if given:
        wanted, why = ending(given), f"like --input={shown(given)}"
    check(ending(output) == wanted, f"--output={shown(output)} must end with {wanted}, {why}")
    check_output(output, given, options.overwrite)


def _columns(options: Namespace, settings: ConfigDict, run: ConfigDict) -> tuple["Fields", str]:
    """Returns the text columns of the table, and the name of the first column that is added.

    --config.data.fields has the same meaning as in training. --config.data.label is the same as --label.
    """
    from common.errors import check
    from common.storage.addresses import shown
    from perception.labelling import fields_of, split_fields

    for option, field in (("text", "fields"), ("label", "label")):
        check(
            not (getattr(options, option) and settings.data[field]),
            f"--{option} and --config.data.{field} both name the {option} column: remove one of the two options",
        )
    texts, label = fields_of(run)
    if options.text:
        texts = [[name] for name in options.text]
    elif settings.data.fields:
        texts = split_fields(settings.data.fields)
    check(
        not run.data.get("pair", False) or len(texts) == 2,
        f"{options.option}={shown(options.run)} classifies pairs of texts and needs two text columns, got {len(texts)}:"
        " name them with --text=FIRST --text=SECOND"
        + ", and leave out --config.data.fields"
        * bool(settings.data.fields),
    )
    return texts, options.label or settings.data.label or label


def main() -> None:
    from common import config

    fields, rest = config.split_fields(sys.argv[1:])
    options = _parser().parse_args(rest)
    settings = ConfigDict(
        {"data": {"fields": "", "label": ""}, "mesh": {"data": -1, "fsdp": 1, "tensor": 1}}
    )
    config.override_all(settings, fields)

    from tqdm import tqdm

    from common.atomic import write_output
    from common.sharding import make_mesh
    from common.storage.addresses import shown
    from common.storage.folders import output
    from perception.labelling import Answers, Labeller, load_run
    from perception.table_files import check_encoding
    from perception.text_tables import Lines, open_table

    run = load_run(
        options.run,
        pretrained=options.pretrained,
        batch=options.batch,
        mesh=make_mesh(settings.mesh),
        option=options.option,
    )
    pair = run.config.data.get("pair", False)
    check_encoding(options.encoding)
    table = (
        open_table(options.input, pair, options.encoding)
        if options.input
        else Lines(sys.stdin.buffer, pair, options.encoding)
    )
    ranked = isinstance(table, Lines)
    columns = {
        "--text": options.text,
        "--label": options.label,
        "--config.data.fields": settings.data.fields,
        "--config.data.label": settings.data.label,
    }
    if ranked and (names := [name for name, value in columns.items() if value]):
        source = f"--input={shown(options.input)}" if options.input else "standard input"
        raise UserError(
            f"{names[0]} names a column, but {source} is lines of text without columns: remove {names[0]}"
        )
    if options.output:
        _check_output(options)
    texts, label = _columns(options, settings, run.config)
    # Lines of text are written without column names. The fixed name "label" differs from all other column names, which
    # the name of the run's label might not.
    answers = Answers(
        "label" if ranked else label, run.classes, options.top, ranked, run.thresholds
    )
    count = 0
    if options.input:
        # Read the whole file once, so that an invalid row raises an error before the network is loaded.
        count = sum(len(block.texts) for block in table.blocks(BLOCK, texts, answers.columns))
    labeller = Labeller(run.classifier(), answers)
    blocks = table.blocks(BLOCK if options.input else options.batch, texts, answers.columns)
    # Without --input, the number of texts is unknown: show no progress bar. With disable=None, tqdm shows the bar only
    # on a terminal.
    with tqdm(total=count, unit=" texts", disable=None if options.input else True) as bar:
        labelled = labeller(blocks, bar.update)
        if options.output:
            with output(options.output):
                write_output(
                    options.output, lambda file: table.write(file, answers.columns, labelled)
                )
        else:
            table.write(sys.stdout.buffer, answers.columns, labelled)
    for note in labeller.notes:
        print(note, file=sys.stderr)
    if options.output:
        print(f"written: {shown(options.output)}, {labeller.texts:,} texts")


if __name__ == "__main__":
    program.run(main)
