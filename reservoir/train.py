"""Trains a reservoir transformer: python -m reservoir.train --config=configs/wmt_ffn_res.py:tiny"""

import sys

from common import distributed, errors
from common.config import parse
from common.sharding import make_mesh
from common.tasks.translation import Translation
from common.train.loop import fit
from common.train.preemption import Preempted
from reservoir.model import translator, validate
from reservoir.report import print_summary


def main() -> None:
    config, options = parse("reservoir.train")
    validate(config.model)
    distributed.initialize()
    mesh = make_mesh(config.mesh)
    try:
        summary = fit(config, Translation(config, translator, mesh), options.workdir, mesh)
    except Preempted as stop:
        print(stop, file=sys.stderr)
        sys.exit(stop.exit_code)
    if distributed.is_main():
        print_summary(summary, options.workdir)


if __name__ == "__main__":
    errors.run(main)
