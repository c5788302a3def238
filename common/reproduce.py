"""The program `python -m PAPER.reproduce`, for every paper: trains missing runs, writes tables, figures and claims."""

import importlib
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ml_collections import ConfigDict

from common import config
from common.arguments import check_folder, check_unused, int_arg, parse_pairs
from common.errors import check
from common.storage.folders import open_folder, open_path, output

if TYPE_CHECKING:
    from jax.sharding import Mesh

CLAIMS = "claims"
"""Name of the target that every paper has: the table of the paper's claims."""


def reproduce_parser(paper: str, targets: Iterable[str], description: str | None) -> ArgumentParser:
    """Returns a parser with the options of `reproduce` that all papers share. `targets` names tables and figures."""
    parser = config.parser_for(f"{paper}.reproduce", description)
    parser.add_argument("target", choices=(*targets, CLAIMS))
    parser.add_argument(
        "--scale",
        choices=("tiny", "laptop", "paper"),
        default="tiny",
        help="sizes of models and data; tiny (default) needs no download",
    )
    parser.add_argument(
        "--kept", action="store_true", help="for claims: train nothing, use only finished runs"
    )
    add_runs(parser, seeds=1, out=f"runs/{paper}_reproduce_SCALE")
    parser.epilog = "Fields of the configurations are options, such as --config.train.steps=1000"
    return parser


def named_values(option: str, texts: Iterable[str], names: Iterable[str]) -> dict[str, str]:
    """Parses the values NAME=PATH of an option to {name: path as text}.

    Raises a UserError if a value is malformed, or if a name is repeated or is not in `names`.
    """
    form = f"NAME=PATH, where NAME is one of {', '.join(names)}"
    values = parse_pairs(f"{option}=", texts, form)
    for name, value in values.items():
        config.check_choice(option, name, names)
        check(bool(value), f"{option}={name}= must be {form}")
    return values


def named_paths(option: str, texts: Iterable[str], names: Iterable[str]) -> dict[str, Path]:
    """Parses the values NAME=PATH of an option to {name: path}. Downloads files and folders in a bucket.

    Raises the errors of `named_values` and `open_folder`, and a UserError if a path does not exist.
    """
    paths = {}
    for name, value in named_values(option, texts, names).items():
        path = open_path(os.path.expanduser(value))
        check(
            path.exists(),
            f"{option}={name}={value}: {value} does not exist; correct the path",
        )
        paths[name] = path
    return paths


def add_runs(parser: ArgumentParser, seeds: int, out: str) -> None:
    """Adds --seeds, --out and the options of `add_fairness`. `out` is the default of --out that the help names."""
    parser.add_argument(
        "--seeds",
        type=int_arg("--seeds"),
        default=seeds,
        help="number of seeds of each case; the seeds are 1, 2, ... (default: %(default)s; with fewer than 3 seeds,"
        " verdicts are undecided unless the runs have no randomness)",
    )
    parser.add_argument(
        "--out",
        type=open_folder,
        metavar="DIR",
        help=f"folder of runs, tables and figures (default: {out})",
    )
    add_fairness(parser)


def add_fairness(parser: ArgumentParser) -> None:
    """Adds the options --turns, which makes training seconds comparable, and --sweep, which tunes all cases equally."""
    parser.add_argument(
        "--turns",
        type=int_arg("--turns"),
        default=0,
        metavar="N",
        help="train the runs of a seed in turns, N steps at a time, so that their seconds can be compared",
    )
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="FIELD=V1,V2",
        help="train every case with seed 1 and each value of a configuration field, and use the value with the best"
        " validation result (example: optimizer.learning_rate=1e-4,3e-4,1e-3)",
    )


def make_mesh_of(fields: Iterable[str]) -> "Mesh":
    """Makes a device mesh from overrides "--config.mesh.AXIS=SIZE" in `fields`. By default, "data" has all devices."""
    from common.sharding import make_mesh

    axes = ConfigDict({"mesh": {"data": -1, "fsdp": 1, "tensor": 1}})
    config.override_all(axes, [f for f in fields if f.startswith("--config.mesh.")])
    return make_mesh(axes.mesh)


def reproduce(
    paper: str,
    targets: Mapping[str, str],
    parser: ArgumentParser,
    own: Callable[[Namespace], dict[str, Any]],
) -> None:
    """Trains the missing runs of the target that the command line names, and writes the target's table or figure.

    Calls the target's function with the paper's `ExperimentSuite`. For the target `claims`, calls the suite's method
    `claims`. With --dry-run (if the parser has this option), calls `PAPER.costs.show` instead.

    Args:
      targets: target -> name of the paper's module that has a function with the name of the target.
      own: function from the parsed options to further keyword arguments of the paper's `ExperimentSuite`.
    """
    fields, rest = config.split_fields(sys.argv[1:])
    options = parser.parse_args(rest)
    out = options.out or Path(f"runs/{paper}_reproduce_{options.scale}")
    more = own(options)
    check_folder("--out", out)

    from common.experiments import parse_sweep

    make = importlib.import_module(f"{paper}.experiments").ExperimentSuite
    if options.target != CLAIMS:
        check_unused(options, ["kept"], f"--kept is only for the target {CLAIMS}")
    if options.kept:
        check_unused(options, ("turns", "sweep"), "--kept trains nothing")
    mesh = make_mesh_of(fields)
    fair = {"turns": options.turns, "sweep": parse_sweep(options.sweep)}
    suite = make(options.scale, options.seeds, fields, out, mesh, **fair, **more)
    if getattr(options, "dry_run", False):
        importlib.import_module(f"{paper}.costs").show(suite, options.target)
        return
    with output(out):
        if options.target == CLAIMS:
            suite.claims(paper, options.kept)
        else:
            module = importlib.import_module(f"{paper}.{targets[options.target]}")
            getattr(module, options.target)(suite)
