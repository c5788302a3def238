"""What the training program of every paper does, and the program that reproduces its tables and figures."""

import importlib
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from common import config
from common.config import check

CLAIMS = "claims"
"""A target that every paper has: the table of its claims."""


def train(
    paper: str, show: Callable[[dict, Path], None], program: str = "train", module: str = "run"
) -> None:
    """`python -m PAPER.train`: trains what `PAPER.run.prepare` makes of the command line, then shows the summary.

    Another `program` of the paper may do the same with the `prepare` of another `module`. A module that has `ended` is
    asked first for the summary of a run that needs no preparation.
    """
    experiment, options = config.parse(f"{paper}.{program}")

    from common.runtime import processes
    from common.sharding import make_mesh
    from common.train import dry_run, loop
    from common.train.profile import Profile

    profile = Profile.parse(options.profile)
    own = importlib.import_module(f"{paper}.{module}")
    prepare = own.prepare
    processes.initialize(lambda: _asked(f"{paper}.{program}", experiment, options))
    mesh = make_mesh(experiment.mesh)
    if options.dry_run:
        dry_run.show(*prepare(experiment, mesh), mesh)
        return
    summary = None
    if hasattr(own, "ended") and not options.profile:
        summary = own.ended(experiment, options.workdir)
    if summary is None:
        summary = unless_stopped(
            lambda: loop.fit(*prepare(experiment, mesh), options.workdir, mesh, profile)
        )
    if processes.is_main():
        show(summary, options.workdir)


def _asked(program: str, experiment: ConfigDict, options: Namespace) -> dict[str, str]:
    """What all processes of a run have to be started with; where each keeps its cache is its own business."""
    from common.train.workdir import commit

    asked = {"the program": program, "the code": commit(), "--workdir": options.workdir}
    asked |= {"--dry-run": options.dry_run, "--profile": options.profile}
    asked |= {f"--config.{name}": value for name, value in config.flatten(experiment).items()}
    asked.pop("--config.data.cache_dir", None)
    return {name: str(value) for name, value in asked.items()}


def reproduce_parser(
    paper: str, targets: Mapping[str, str], scales: tuple[str, ...]
) -> ArgumentParser:
    """The options that all papers share; a paper may add its own."""
    parser = config.parser_for(f"{paper}.reproduce")
    parser.add_argument("target", choices=(*targets, CLAIMS))
    parser.add_argument("--scale", choices=scales, default="tiny", help="tiny needs no data")
    parser.add_argument(
        "--seeds", type=config.positive_int_arg("--seeds"), default=1, help="runs of each case"
    )
    parser.add_argument("--out", type=Path, help=f"default runs/{paper}_reproduce_SCALE")
    parser.add_argument(
        "--kept", action="store_true", help="of claims: train nothing, take the runs that there are"
    )
    add_fairness(parser)
    parser.epilog = "Any field of the configurations is an option: --config.data.source=files:DIR"
    return parser


def add_fairness(parser: ArgumentParser) -> None:
    """The options under which runs are compared on equal terms."""
    parser.add_argument(
        "--turns",
        type=config.positive_int_arg("--turns"),
        default=0,
        metavar="N",
        help="the runs of a seed train N steps at a time, in turns, so that their seconds can be compared",
    )
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="FIELD=V1,V2",
        help="every case tries the same values with seed 1, chosen by validation:"
        " optimizer.learning_rate=1e-4,3e-4,1e-3",
    )


def reproduce(
    paper: str,
    targets: Mapping[str, str],
    parser: ArgumentParser,
    own: Callable[[Namespace], dict[str, Any]] = lambda options: {},
) -> None:
    """`python -m PAPER.reproduce TARGET`: calls TARGET of the module that `targets` names, with a laboratory.

    Where the parser has --dry-run, that calls `PAPER.costs.show` instead.

    Args:
      own: what the paper's `experiments.ExperimentSuite` takes beyond what all do, out of the options.
    """
    fields, rest = config.split_fields(sys.argv[1:])
    options = parser.parse_args(rest)
    out = options.out or Path(f"runs/{paper}_reproduce_{options.scale}")
    more = own(options)
    config.check_folder("--out", out)

    from common.experiments import parse_sweep
    from common.sharding import make_mesh

    make = importlib.import_module(f"{paper}.experiments").ExperimentSuite
    check(
        not options.kept or options.target == CLAIMS,
        f"--kept is for {CLAIMS}: {options.target} trains what is missing",
    )
    mesh = ConfigDict({"mesh": {"data": -1, "fsdp": 1, "tensor": 1}})
    config.override_all(mesh, [f for f in fields if f.startswith("--config.mesh.")])
    mesh = make_mesh(mesh.mesh)
    fair = {"turns": options.turns, "sweep": parse_sweep(options.sweep)}
    suite = make(options.scale, options.seeds, fields, out, mesh, **fair, **more)
    if getattr(options, "dry_run", False):
        importlib.import_module(f"{paper}.costs").show(suite, options.target)
        return
    if options.target == CLAIMS:
        unless_stopped(lambda: suite.claims(paper, options.kept))
        return
    module = importlib.import_module(f"{paper}.{targets[options.target]}")
    unless_stopped(lambda: getattr(module, options.target)(suite))


def unless_stopped(call: Callable[[], Any]) -> Any:
    """What it returns; a signal ends the program with a line and the exit code of that signal."""
    from common.runtime.signals import Preempted

    try:
        return call()
    except Preempted as stop:
        print(stop, file=sys.stderr)
        sys.exit(stop.exit_code)
