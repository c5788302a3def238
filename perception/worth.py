"""Is pretraining worth it on your data? python -m perception.worth --config=configs/perception.py:laptop \
    --config.data.source=files:DIR --config.pretrained=DIR

Trains LoRA, all weights and the head alone from pretrained weights (where they are given), all weights from random
ones, and a TF-IDF baseline; says what each reaches and takes, which differences hold against the noise of seeds and of
test examples, and what the paper's data sets of that size let one expect. Fewer than three seeds decide nothing. Called
again, it resumes what was cut off. Any field of the configuration is an option, as in perception.train.
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
        "--seeds", type=config.positive_int_arg("--seeds"), default=1, help="runs of each way"
    )
    parser.add_argument(
        "--margin",
        type=config.float_arg("--margin"),
        default=MARGINS["weighted_f1"],
        metavar="POINTS",
        help="the largest difference of weighted F1 that does not matter (default: %(default)s)",
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

    asked = config.load(options.config)
    config.override_all(asked, fields)
    mesh = make_mesh(asked.mesh)
    given = "", options.seeds, fields, options.out, mesh, options.config, options.margin
    suite = ExperimentSuite(*given, turns=options.turns, sweep=parse_sweep(options.sweep))
    unless_stopped(lambda: worth(suite))


if __name__ == "__main__":
    program.run(main)
