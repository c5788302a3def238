"""Trains several cases of an experiment: python -m common.compare --config=FILE --case A --case B model.width=64

Each case is the configuration FILE with overrides of its own, such as model.width=64. All cases are trained with the
same seeds. Each further case is compared with the first case. --sweep tunes every case on the same grid.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ml_collections import ConfigDict

from common import config
from common.arguments import add_margin, check_folder
from common.errors import check
from common.experiments import ExperimentSuite, parse_fields, parse_sweep, set_fields
from common.runtime import program


@dataclass(frozen=True)
class Cases(ExperimentSuite):
    """Cases of an experiment. A case is a configuration file with overrides of its fields.

    Attributes:
      spec: the configuration file of all cases, "FILE" or "FILE:ARGUMENT".
      overrides: name of a case -> configuration field -> value as text. The field "config" names another
        configuration file for the case.
    """

    spec: str
    overrides: Mapping[str, Mapping[str, str]]

    def configuration(self, name: str, seed: int) -> ConfigDict:
        """Returns the configuration of the case `name` with a seed.

        Applies the overrides of the command line first, then the overrides of the case, in which the text "{seed}"
        stands for the seed.
        """
        fields = {
            key: text.replace("{seed}", str(seed)) for key, text in self.overrides[name].items()
        }
        option = f"--case {name} config" if "config" in fields else "--config"
        loaded = self.override(config.load(fields.pop("config", self.spec), option))
        set_fields(loaded, fields, f"--case {name}")
        loaded.seed = seed
        return loaded


def parse_cases(options: Sequence[Sequence[str]]) -> dict[str, dict[str, str]]:
    """Parses the values of --case to {name: {field: value}}. Each value is a list: a name, then FIELD=VALUE texts.

    Raises a UserError if there are fewer than two cases, a name is repeated or has invalid characters, or a field is
    malformed, is repeated or is the seed.
    """
    cases: dict[str, dict[str, str]] = {}
    for name, *texts in options:
        check(
            re.fullmatch(r"\w[\w.-]*", name) is not None,
            f"--case {name}: the name becomes part of a folder name, so it must begin with a letter, a digit or '_',"
            " and have only letters, digits, '_', '-' and '.'",
        )
        check(name not in cases, f"--case {name}: two cases have this name; rename one of them")
        cases[name] = parse_fields(f"--case {name} ", texts, "FIELD=VALUE, such as model.width=64")
    check(
        len(cases) > 1,
        f"give at least two cases, each --case NAME [FIELD=VALUE ...]; the number of cases is {len(cases)}",
    )
    return cases


def main() -> None:
    from common.reproduce import add_runs, make_mesh_of

    parser = config.parser_for("common.compare", __doc__)
    parser.add_argument(
        "--config", required=True, metavar="FILE[:ARG]", help="configuration file of all cases"
    )
    parser.add_argument(
        "--case",
        nargs="+",
        action="append",
        default=[],
        metavar=("NAME", "FIELD=VALUE"),
        help="a case and its configuration fields, such as --case small model.width=64; config=FILE[:ARG] names another"
        " configuration file; {seed} in a value becomes the seed. Other cases are compared with the first case",
    )
    add_margin(parser)
    add_runs(parser, seeds=3, out="runs/compare")
    parser.epilog = (
        "Any field of the configuration is an option for all cases: --config.train.steps=100"
    )
    fields, rest = config.split_fields(sys.argv[1:])
    options = parser.parse_args(rest)
    out = options.out or Path("runs/compare")
    check_folder("--out", out)

    from common.report import report
    from common.report.groups import Group, layers_of

    margins = report.parse_margins(options.margin)
    suite = Cases(
        *("", options.seeds, fields, out, make_mesh_of(fields)),
        turns=options.turns,
        sweep=parse_sweep(options.sweep),
        spec=options.config,
        overrides=parse_cases(options.case),
    )
    experiments = {name: partial(suite.configuration, name) for name in suite.overrides}
    for make in experiments.values():
        make(1)  # Report a wrong field before the first run is trained.
    runs = suite.runs(experiments)
    compared = [
        Group(name, name, tuple(ran), layers_of(ran[0].config)) for name, ran in runs.items()
    ]
    axis = "seconds" if options.turns else "step"
    report.write(compared, out, margins=margins, axis=axis)


if __name__ == "__main__":
    program.run(main, trains=True)
