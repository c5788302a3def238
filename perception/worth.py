"""Trains classifiers of your texts and measures the gain from pretraining: python -m perception.worth --data mails.csv

    python -m perception.worth --data mails.csv --config.pretrained=DIR --budget 30m
    python -m perception.worth --config=configs/perception.py:laptop --config.data.source=files:DIR

Trains from pretrained weights (LoRA, all weights, head; needs --config.pretrained) and from random weights, and fits a
TF-IDF baseline. Writes report.html: the best classifier, its scores with intervals, its errors, verdicts on the
differences between classifiers, and the command that uses the best classifier. A verdict on a method whose result
depends on the seed needs three seeds or more. Running the command again resumes interrupted runs. Fields of the
configuration are options, as in perception.train, except --config.finetune (use --ways), --config.seed (use --seeds)
and, with --data, the fields that describe the data.

--data is a CSV, TSV, JSON lines or Parquet file (plain or .gz), a folder of such files, or hf:NAME[@REVISION] from the
local cache (or from the hub with --download). The splits are written to --out. --pair reads pairs of texts. A repeated
--label, or --separator, reads several classes per text. --balance is for imbalanced classes, --shots N for N labelled
examples per class. --budget plans the runs for a time limit and tunes the learning rate.
"""

import os
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from common.runtime import program

if TYPE_CHECKING:
    from ml_collections import ConfigDict

    from perception.comparison import About

DATA_FIELDS = (
    "source",
    "splits.",
    "fields",
    "label",
    "tfds_dir",
    "premise_only",
    "pair",
    "multi_label",
)
"""Fields of `config.data` that describe the data. With --data, an override of such a field is an error."""

RESULTS = (
    *("answer.txt", "plan.json", "probe", "report.html"),
    *("verdicts.csv", "verdicts.md", "worth.csv", "worth.md"),
)
"""Names in --out that the program replaces, beside the folders `data` and `runs`."""

DRAWS = 5
"""Default number of seeds with --shots. Each seed draws other examples."""


def _parser() -> ArgumentParser:
    from common import config
    from common.arguments import float_arg, int_arg
    from common.report.significance import MARGINS
    from common.reproduce import add_fairness
    from common.storage.folders import open_folder
    from perception.ways import BASELINE, TRAINABLE

    parser = config.parser_for("perception.worth", __doc__)
    parser.add_argument(
        "--data",
        default="",
        metavar="FILE",
        help="labelled texts: a CSV, TSV, JSON lines or Parquet file, a folder of such files, or hf:NAME",
    )
    parser.add_argument(
        "--text",
        action="append",
        default=[],
        metavar="COLUMN",
        help="text column of --data; repeat the option for several columns",
    )
    parser.add_argument(
        "--pair",
        action="store_true",
        help="the two text columns hold pairs of texts, such as premise and hypothesis",
    )
    parser.add_argument(
        "--label",
        action="append",
        default=[],
        metavar="COLUMN",
        help="label column of --data; repeat the option for several columns of 0 and 1, one for each class",
    )
    parser.add_argument(
        "--separator",
        default="",
        metavar="TEXT",
        help="text that separates the classes in a label, such as ';' in spam;urgent",
    )
    parser.add_argument("--encoding", default="", help="encoding of --data, such as cp1252")
    parser.add_argument(
        "--strict", action="store_true", help="refuse --data with unusable or contradictory rows"
    )
    parser.add_argument(
        "--download",
        action="store_true",
        help="allow the program to download --config.pretrained=NAME and --data=hf:NAME",
    )
    parser.add_argument(
        "--balance", action="store_true", help="give all classes equal weight in training"
    )
    parser.add_argument(
        "--shots",
        type=int_arg("--shots"),
        metavar="N",
        help="train on N examples per class, and select the best step on N more; each seed draws other examples",
    )
    parser.add_argument(
        "--budget",
        default="",
        metavar="TIME",
        help="planned time of all runs, such as 10m or 2h; determines the training methods, the steps and the seeds",
    )
    parser.add_argument(
        "--config",
        default="",
        metavar="FILE[:ARG]",
        help="configuration file (default with --data: configs/perception.py:laptop)",
    )
    parser.add_argument(
        "--seeds",
        type=int_arg("--seeds"),
        metavar="N",
        help=f"number of seeds of each training method, with one run per seed (default: 1, or {DRAWS} with --shots)",
    )
    parser.add_argument(
        "--ways",
        default="",
        metavar="WAY,WAY",
        help=f"methods besides TF-IDF, among {', '.join(TRAINABLE)} (default: all, or only full if --config.pretrained"
        f" is not set); {BASELINE} trains only TF-IDF",
    )
    parser.add_argument(
        "--margin",
        type=float_arg("--margin"),
        default=MARGINS["weighted_f1"],
        metavar="POINTS",
        help="equivalence margin in points of weighted F1 (default: %(default)s)",
    )
    add_fairness(parser)
    parser.add_argument(
        "--kept",
        action="store_true",
        help="print and write the tables of the finished runs in --out; read neither data nor pretrained weights",
    )
    parser.add_argument(
        "--out",
        type=open_folder,
        metavar="DIR",
        help="output folder (default: runs/worth, or with --data=NAME.csv runs/worth_NAME)",
    )
    return parser


def _check(options: Namespace, fields: list[str]) -> None:
    """Raises a UserError for options that contradict each other, and for missing options."""
    from common.errors import check

    if options.kept:
        defaults = vars(_parser().parse_args([]))
        changed = [name for name, value in vars(options).items() if value != defaults[name]]
        others = [f"--{name}" for name in changed if name not in ("kept", "margin", "out")]
        check(
            not (others or fields),
            f"--kept trains nothing: remove {' and '.join([*others, *fields])}",
        )
        check(bool(options.out), "--kept needs --out=DIR, the folder of finished runs")
        return
    own = [
        name
        for name in ("text", "pair", "label", "separator", "encoding", "strict")
        if getattr(options, name)
    ]
    check(
        bool(options.data) or not own,
        f"--{' and --'.join(own)} cannot be used without --data=FILE: add --data, or remove --{' and --'.join(own)}",
    )
    check(
        bool(options.data or options.config),
        "--data and --config are missing: use --data=FILE, or --config=configs/perception.py:laptop with"
        " --config.data.source=files:DIR",
    )
    taken = ("--config.dataset", *(f"--config.data.{name}" for name in DATA_FIELDS))
    both = [field for field in fields if options.data and field.startswith(taken)]
    check(
        not both,
        f"{' '.join(both)} cannot be combined with --data: remove --data, or remove {' and '.join(both)}",
    )
    planned = [name for name in ("seeds", "turns", "sweep", "ways") if getattr(options, name)]
    others = " and ".join(f"--{name}" for name in planned)
    check(
        not (options.budget and planned),
        f"--budget plans the runs and cannot be combined with {others}: remove --budget, or remove {others}",
    )


def _out(options: Namespace) -> Path:
    if options.out or not options.data:
        return options.out or Path("runs/worth")
    name = options.data.removeprefix("hf:").partition("@")[0].rstrip("/")
    return Path(f"runs/worth_{Path(name).name.partition('.')[0] or 'data'}")


def _check_out(data: str, out: Path) -> None:
    """Raises a UserError if the program would replace --data, or files in `out` that it has not written.

    The TF-IDF baseline runs first. So if `out` lacks its run, files with the names of results come from elsewhere.
    """
    from common.errors import check
    from common.storage.addresses import copy_of, shown
    from perception.labelled_table import DATA
    from perception.ways import BASELINE

    others = [name for name in RESULTS if (out / name).exists()]
    check(
        not others or any(out.glob(f"runs/{BASELINE}*")),
        f"--out={shown(out)} has {', '.join(others)}, which this program would replace, but no run of this program:"
        " choose another --out, or move these files",
    )
    if data and not data.startswith("hf:"):
        source = copy_of(os.path.expanduser(data)).resolve()
        written = [(out / name).resolve() for name in (*RESULTS, DATA, "runs")]
        check(
            source != out.resolve() and not any(map(source.is_relative_to, written)),
            f"--data={data} lies where this program writes the results of --out={shown(out)}: choose another --out",
        )


def _download(data: str, experiment: "ConfigDict") -> None:
    """Downloads the pretrained model if --config.pretrained is a hub name. `read_tables` downloads --data=hf:NAME."""
    from common.errors import check
    from perception.train import fetch_pretrained

    check(
        bool(experiment.get("pretrained")) or data.startswith("hf:"),
        "--download needs --config.pretrained=NAME with a name on the Hugging Face hub, or --data=hf:NAME",
    )
    if experiment.get("pretrained"):
        fetch_pretrained(experiment)


def _data_fields(options: Namespace, out: Path) -> list[str]:
    """Returns overrides that make a run read the splits that `_prepare` writes."""
    from perception.labelled_table import DATA, TEXTS

    fields = [f"--config.data.source=files:{out / DATA}", "--config.dataset="]
    pair = [f"--config.data.fields={' '.join(TEXTS)}", "--config.data.pair=true"]
    return fields + pair * options.pair


def _prepare(options: Namespace, out: Path) -> tuple[list[str], "About"]:
    """Writes the splits of --data to `out`, so that the examples need no memory afterwards.

    Returns overrides that the labels need, and the report's text about the data.
    """
    from perception.comparison import About
    from perception.labelled_table import prepare, write
    from perception.table_files import format_of
    from perception.table_reader import read_tables

    prepared = prepare(
        read_tables(options.data, options.encoding, options.download),
        options.text,
        options.label,
        options.strict,
        options.pair,
        options.separator,
    )
    print("\n".join(prepared.notes.sentences), flush=True)
    write(prepared, out)
    columns = [f"--text={name}" for name in prepared.text]
    if len(prepared.label) == 1:
        columns.append(f"--label={prepared.label[0]}")
    if options.encoding:
        columns.append(f"--encoding={options.encoding}")
    return ["--config.data.multi_label=true"] * prepared.several, About(
        title=f"A classifier for {Path(options.data).name}",
        places=[example.place for example in prepared.splits["test"]],
        notes=prepared.notes.sentences,
        ending=format_of(Path(options.data)) or ".csv",
        options=columns,
    )


def _print_kept(options: Namespace) -> None:
    import jax

    from common.sharding import make_mesh
    from common.storage.folders import output
    from perception.comparison import ExperimentSuite, write_tables

    mesh = make_mesh({}, jax.devices()[:1])
    suite = ExperimentSuite("", 1, [], options.out, mesh, "", options.margin)
    with output(options.out):
        write_tables(suite, suite.finished())


def main() -> None:
    from common import config
    from common.arguments import check_folder
    from perception.budget import parse_seconds

    fields, rest = config.split_fields(sys.argv[1:])
    options = _parser().parse_args(rest)
    _check(options, fields)
    if options.kept:
        return _print_kept(options)
    fields += ["--config.data.balance=true"] * options.balance
    fields += [f"--config.data.shots={options.shots}"] * bool(options.shots)
    seconds = parse_seconds(options.budget) if options.budget else 0.0
    out = _out(options)
    check_folder("--out", out)
    _check_out(options.data, out)
    spec = options.config or f"{find_spec('configs.perception').origin}:laptop"
    experiment = config.load(spec)
    config.check_paper(spec, experiment, "perception.worth")
    config.override_all(experiment, fields)
    if options.download:
        _download(options.data, experiment)

    from common.experiments import parse_sweep
    from common.sharding import make_mesh
    from common.storage.folders import output
    from perception.comparison import About, ExperimentSuite, worth

    about = About()
    fields += _data_fields(options, out) if options.data else []
    with config.complete(f"--config={spec}"):
        seeds = options.seeds or (DRAWS if experiment.data.shots else 1)
        arguments = "", seeds, fields, out, make_mesh(experiment.mesh), spec
    fair = {"turns": options.turns, "sweep": parse_sweep(options.sweep)}
    only = tuple(options.ways.split(",")) if options.ways else ()
    suite = ExperimentSuite(*arguments, options.margin, only, **fair)
    if options.data:
        suite.ways()  # raise errors about options before reading data
        more, about = _prepare(options, out)
        suite = replace(suite, fields=[*fields, *more])
    with output(out):
        worth(suite, about, seconds)


if __name__ == "__main__":
    program.run(main, trains=True)
