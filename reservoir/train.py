"""Trains a reservoir transformer: python -m reservoir.train --config=configs/wmt_ffn_res.py:tiny"""

import sys

from common import program


def main() -> None:
    from common import config

    experiment, options = config.parse("reservoir.train")

    from common import distributed
    from common.sharding import make_mesh
    from common.tasks import translation
    from common.train import loop
    from common.train.preemption import Preempted
    from reservoir.model import translator, validate
    from reservoir.report import print_summary

    with config.complete("--config"):  # here already: reading the data may take minutes
        validate(experiment.model)
        translation.validate(experiment)
        loop.validate(experiment)
    distributed.initialize()
    mesh = make_mesh(experiment.mesh)
    try:
        task = translation.Translation(experiment, translator, mesh)
        summary = loop.fit(experiment, task, options.workdir, mesh)
    except Preempted as stop:
        print(stop, file=sys.stderr)
        sys.exit(stop.exit_code)
    if distributed.is_main():
        print_summary(summary, options.workdir)


if __name__ == "__main__":
    program.run(main)
