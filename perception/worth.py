"""Is pretraining worth it on your data? python -m perception.worth --config=configs/perception.py:laptop \
    --config.data.source=files:DIR --config.pretrained=DIR

Trains from pretrained weights (LoRA, all weights, head; needs --config.pretrained), from random weights, and a TF-IDF
baseline. Reports F1, cost and verdicts on the differences, and the difference expected from the paper's data sets. A
verdict needs three seeds or more. Running it again resumes interrupted runs. Accepts overrides like perception.train.
"""

import sys
from pathlib import Path

from common.runtime import program


def main() -> None:
    from common import config
    from common.report.verdict import MARGINS
    from common.train.command import add_fairness

    parser = config.parser_for("perception.worth")
    parser.add_argument("--config", required=True, metavar="FILE[:ARG]", help="the configuration")
    parser.add_argument(
        "--seeds", type=config.positive_int_arg("--seeds"), default=1, help="seeds of each way"
    )
    parser.add_argument(
        "--margin",
        type=config.float_arg("--margin"),
        default=MARGINS["weighted_f1"],
        metavar="POINTS",
        help="equivalence margin in points of weighted F1 (default: %(default)s)",
    )
    add_fairness(parser)
    parser.add_argument("--out", type=Path, default=Path("runs/worth"), metavar="DIR")
    fields, rest = config.split_fields(sys.argv[1:])
    options = parser.parse_args(rest)
    config.check_folder("--out", options.out)

    from common.experiments import parse_sweep
    from common.sharding import make_mesh
    from common.train.command import unless_stopped
    from perception.comparison import ExperimentSuite, worth

    experiment = config.load(options.config)
    config.override_all(experiment, fields)
    mesh = make_mesh(experiment.mesh)
    arguments = "", options.seeds, fields, options.out, mesh, options.config, options.margin
    suite = ExperimentSuite(*arguments, turns=options.turns, sweep=parse_sweep(options.sweep))
    unless_stopped(lambda: worth(suite))


if __name__ == "__main__":
    program.run(main)
