"""The paper's table and figures, measured beside printed: python -m explicit_opt.reproduce table1 --scale=tiny

Runs what is missing, goes on with what was cut off, and writes CSV, Markdown and PNG into --out. Any field of the
configurations is an option, as in explicit_opt.train: --config.data.source=files:DIR
"""

import importlib
import sys
from pathlib import Path

from common import program

TARGETS = {
    "table1": "experiments",
    "fig1": "experiments",
    "fig2": "experiments",
    "fig3": "experiments",
    "formula": "arithmetic",
    "sensitivity": "arithmetic",
}
"""The paper's table and figures, and two tables of the page of proof, with the module of each."""

SCALES = ("tiny", "laptop", "paper")


def main() -> None:
    from common.config import parser_for, positive

    parser = parser_for("explicit_opt.reproduce")
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--scale", choices=SCALES, default="tiny", help="tiny needs no data")
    parser.add_argument("--seeds", type=positive("--seeds"), default=1, help="runs of each start")
    parser.add_argument("--out", type=Path, help="default runs/explicit_opt_SCALE")
    fields = [a for a in sys.argv[1:] if a.startswith("--config.")]
    options = parser.parse_args([a for a in sys.argv[1:] if a not in fields])
    out = options.out or Path(f"runs/explicit_opt_{options.scale}")

    from common.sharding import make_mesh
    from common.train.preemption import Preempted
    from explicit_opt.experiments import Laboratory

    module = importlib.import_module(f"explicit_opt.{TARGETS[options.target]}")
    try:
        lab = Laboratory(options.scale, options.seeds, fields, out, make_mesh({"data": -1}))
        getattr(module, options.target)(lab)
    except Preempted as stop:
        print(stop, file=sys.stderr)
        sys.exit(stop.exit_code)


if __name__ == "__main__":
    program.run(main)
