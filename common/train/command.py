"""The `train` and `reproduce` programs of every paper."""

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
"""The target of `reproduce` that every paper has: the table of its claims."""


def train(
    paper: str, show: Callable[[dict, Path], None], program: str = "train", module: str = "run"
) -> None:
    """`python -m PAPER.train`: prepares a run from the command line, trains it and shows the summary.

    Args:
      show: prints a summary, given the workdir.
      program: another name than "train".
      module: the module of the paper whose `prepare` makes the task. Its function `ended`, if there is one, is asked
        first: a finished run needs no data.
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
    """Settings that have to be the same on all processes; the cache directory may differ."""
    from common.train.workdir import commit

    asked = {"the program": program, "the code": commit(), "--workdir": options.workdir}
    asked |= {"--dry-run": options.dry_run, "--profile": options.profile}
    asked |= {f"--config.{name}": value for name, value in config.flatten(experiment).items()}
    asked.pop("--config.data.cache_dir", None)
    return {name: str(value) for name, value in asked.items()}


def reproduce_parser(
    paper: str, targets: Mapping[str, str], scales: tuple[str, ...]
) -> ArgumentParser:
    """The options of `reproduce` that all papers share."""
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
    """Adds --turns and --sweep: equal clocks and equal tuning for all runs of a comparison."""
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
    """`python -m PAPER.reproduce TARGET`: calls the function TARGET with the paper's experiment suite.

    With --dry-run, where the parser has it, calls `PAPER.costs.show` instead.

    Args:
      targets: the module of each target.
      own: options -> additional arguments of the paper's `ExperimentSuite`.
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
    """Calls `call`; a signal that stopped its run ends the program with one line and the signal's exit code."""
    from common.runtime.signals import Preempted

    try:
        return call()
    except Preempted as stop:
        print(stop, file=sys.stderr)
        sys.exit(stop.exit_code)
