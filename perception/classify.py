"""Classifies texts with a trained run: python -m perception.classify --workdir=RUN --input=new.csv --output=FILE.csv

Adds columns with the most probable class and probabilities to a table. Without --input, reads one text per line from
standard input; without --output, writes to standard output. For each line of text, one line with class names and
probabilities is written, separated by tabs, most probable class first. If the run was trained on pairs, a line has two
texts, separated by a tab. If a text may have several classes, only classes above their thresholds are written.

--config.data.fields and --config.data.label name the text columns and the label column (default: the run's columns).
--config.mesh.data, .fsdp and .tensor set the mesh. By default the rows of a batch are split over all devices.
"""

import sys
from argparse import ArgumentParser, Namespace

from ml_collections import ConfigDict

from common.runtime import program

BLOCK = 4096
"""Number of rows of a file that are read at once, sorted by length and classified in batches."""


def _parser() -> ArgumentParser:
    from common.config import parser_for, positive_int_arg
    from common.storage.folders import open_file, open_folder

    parser = parser_for("perception.classify")
    folder, file = {"type": open_folder, "metavar": "DIR"}, {"type": open_file, "metavar": "FILE"}
    parser.add_argument("--workdir", "--run", required=True, **folder, help="directory of the run")
    parser.add_argument(
        "--pretrained",
        **folder,
        help="pretrained weights (default: the directory that the run used)",
    )
    parser.add_argument(
        "--input",
        **file,
        help=".csv, .tsv, .jsonl or .txt (each optionally followed by .gz), or .parquet (default: lines of"
        " standard input)",
    )
    parser.add_argument(
        "--output",
        **file,
        help="file with the same extension as --input, written atomically (default: standard output)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing --output")
    parser.add_argument(
        "--top",
        type=positive_int_arg("--top"),
        metavar="K",
        help="number of classes to write (default: all)",
    )
    parser.add_argument(
        "--batch", type=positive_int_arg("--batch"), default=64, metavar="N", help="batch size"
    )
    parser.epilog = "Further options: --config.data.fields, --config.data.label, --config.mesh.*"
    return parser


def _check_output(options: Namespace) -> None:
    from common.config import check, check_folder
    from perception.text_tables import ending

    output, given = options.output, options.input
    wanted, source = (ending(given), given) if given else (".txt", "standard input")
    check(ending(output) == wanted, f"--output={output} must end with {wanted}, like {source}")
    check_folder("--output", output.parent)
    check(
        options.overwrite or not output.exists(),
        f"--output={output} exists: add --overwrite to replace it",
    )


def main() -> None:
    from common import config

    fields, rest = config.split_fields(sys.argv[1:])
    options = _parser().parse_args(rest)
    settings = ConfigDict(
        {"data": {"fields": "", "label": ""}, "mesh": {"data": -1, "fsdp": 1, "tensor": 1}}
    )
    config.override_all(settings, fields)

    from tqdm import tqdm

    from common.data.cache import write_atomic
    from common.sharding import make_mesh
    from common.storage.folders import output
    from perception import loading
    from perception.labelling import Answers, Labeller, fields_of
    from perception.text_tables import Lines, open_table

    run = loading.read(options.workdir)
    pair = run.data.pair
    table = open_table(options.input, pair) if options.input else Lines(sys.stdin.buffer, pair)
    if options.output:
        _check_output(options)
    texts, label = fields_of(run)
    texts, label = settings.data.fields or texts, settings.data.label or label
    config.check(
        not pair or len(texts.split()) == 2,
        f"{options.workdir} classifies pairs of texts: --config.data.fields={texts!r} must name two columns",
    )
    answers = Answers(
        label,
        loading.read_classes(options.workdir),
        options.top,
        ranked=isinstance(table, Lines),
        thresholds=loading.read_thresholds(options.workdir, run),
    )
    mesh, count = make_mesh(settings.mesh), 0
    if options.input:
        # Read the whole file once, so that an invalid row raises an error before the model is loaded.
        count = sum(len(block.texts) for block in table.blocks(BLOCK, texts, answers.columns))
    trained = loading.load(options.workdir, mesh, options.pretrained)
    labeller = Labeller(trained, answers, options.batch)
    blocks = table.blocks(BLOCK if options.input else options.batch, texts, answers.columns)
    # Show a progress bar only with --input, and with disable=None only on a terminal.
    with tqdm(total=count, unit=" texts", disable=None if options.input else True) as bar:
        labelled = labeller(blocks, bar.update)
        if options.output:
            with output(options.output):
                write_atomic(
                    options.output, lambda file: table.write(file, answers.columns, labelled)
                )
        else:
            table.write(sys.stdout.buffer, answers.columns, labelled)
    for note in labeller.notes:
        print(note, file=sys.stderr)
    if options.output:
        print(f"written: {options.output}, {labeller.texts:,} texts")


if __name__ == "__main__":
    program.run(main)
