"""The program `python -m PAPER.train`, which all papers share."""

import importlib
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from ml_collections import ConfigDict

from common import config


def train(
    paper: str,
    show: Callable[[dict, Path], None],
    program: str = "train",
    module: str = "run",
    download: Callable[[ConfigDict], None] | None = None,
) -> None:
    """Trains, or resumes, the run of the command line and prints its summary.

    With --dry-run, calls `dry_run.show` instead.

    Args:
      show: function (summary, workdir) that prints the summary.
      program: name of the program in `python -m PAPER.PROGRAM`.
      module: the paper's module with the function `prepare`, which returns configuration and task. The module may also
        have a function `ended`, which returns the summary of a finished run without reading data, else None.
      download: function that downloads the pretrained model of the configuration. Called before `prepare`, if the
        command line has --download. None: the program does not have this option.
    """
    flags = {"--download": "first download the model of --config.pretrained"} if download else {}
    experiment, options = config.parse(f"{paper}.{program}", flags=flags)

    from common.runtime import processes
    from common.sharding import make_mesh
    from common.train import loop

    profile = None
    if options.profile:
        from common.train.profile import Profile

        profile = Profile.parse(options.profile)
    paper_module = importlib.import_module(f"{paper}.{module}")
    processes.initialize(lambda: _settings(f"{paper}.{program}", experiment, options))
    if download and options.download:
        download(experiment)
    with config.complete(f"--config={options.config}"):
        mesh = make_mesh(experiment.mesh)
    if options.dry_run:
        from common.train import dry_run

        dry_run.show(*paper_module.prepare(experiment, mesh), mesh)
        return
    summary = None
    if hasattr(paper_module, "ended") and not profile:
        summary = paper_module.ended(experiment, options.workdir)
    if summary is None:
        prepared = paper_module.prepare(experiment, mesh)
        summary = loop.fit(*prepared, options.workdir, mesh, profile)
    if processes.is_main():
        show(summary, options.workdir)


def _settings(program: str, experiment: ConfigDict, options: Namespace) -> dict[str, str]:
    """Returns {name: value} of the settings that must be equal on all processes.

    These are the program, the code, the options --workdir, --dry-run and --profile, and all fields of the configuration
    except `data.cache_dir`.
    """
    from common.train.workdir import code_version

    code = code_version("common", "configs", program.partition(".")[0])
    settings = {"the program": program, "the code": code, "--workdir": options.workdir}
    settings |= {"--dry-run": options.dry_run, "--profile": options.profile}
    settings |= {f"--config.{name}": value for name, value in config.flatten(experiment).items()}
    settings.pop("--config.data.cache_dir", None)
    return {name: str(value) for name, value in settings.items()}
