"""The training programs of all papers, such as `python -m PAPER.train`."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from ml_collections import ConfigDict

from common import config

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from common.train.profile import Profile


def train(
    paper: str,
    show: Callable[[dict, Path], None],
    program: str = "train",
    module: str = "run",
    download: Callable[[ConfigDict], None] | None = None,
) -> None:
    """Trains, or resumes, the run of the command line and prints its summary. With --dry-run, trains nothing.

    Args:
      paper: name of the paper's folder.
      show: function (summary, workdir) that prints the summary.
      program: name of the program in `python -m PAPER.PROGRAM`.
      module: name of the paper's module with the function `prepare`, which returns configuration and task. The module
        may also have a function `ended`, which returns the summary of an ended run without reading data, or None if the
        run has not ended or the summary cannot be used again.
      download: function that downloads the pretrained model of the configuration, for the option --download; None for
        a program without this option.
    """
    flags = {"--download": "first download the model of --config.pretrained"} if download else {}
    experiment, options = config.parse(f"{paper}.{program}", flags=flags)

    from common.runtime import processes
    from common.sharding import make_mesh

    def settings() -> dict[str, str]:
        from common.train import agreement  # only runs of several processes import it

        return agreement.settings(f"{paper}.{program}", experiment, options)

    profile = None
    if options.profile:
        from common.train.profile import Profile

        profile = Profile.parse(options.profile)
    paper_module = importlib.import_module(f"{paper}.{module}")
    processes.initialize(settings)
    if download and options.download:
        download(experiment)
    with config.complete(f"--config={options.config}"):
        mesh = make_mesh(experiment.mesh)
    if options.dry_run:
        from common.train import dry_run

        dry_run.show(*paper_module.prepare(experiment, mesh), mesh)
        return
    summary = fit(experiment, options.workdir, mesh, paper_module, profile)
    if processes.is_main():
        show(summary, options.workdir)


def fit(
    experiment: ConfigDict,
    workdir: Path,
    mesh: "Mesh",
    module: ModuleType | None = None,
    profile: "Profile | None" = None,
) -> dict:
    """Trains or resumes the run in `workdir`, unless it has ended. Returns its summary, as `loop.fit` does.

    Args:
      module: module with the function `prepare` and optionally `ended`, as in `train`. The default is the module `run`
        of the paper that the configuration names.
      profile: see `loop.fit`. With a profile, `ended` is not called.

    Raises the errors of `config.run_module`, `prepare`, `ended` and `loop.fit`.
    """
    from common.train import loop

    module = module or config.run_module(experiment)
    if hasattr(module, "ended") and not profile:
        summary = module.ended(experiment, workdir)
        if summary is not None:
            return summary
    return loop.fit(*module.prepare(experiment, mesh), workdir, mesh, profile)
