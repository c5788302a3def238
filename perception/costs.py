"""Lists the cells of Table 1 without training: python -m perception.reproduce table1 --dry-run"""

from common.report.table import text
from perception import run
from perception.backbones import BACKBONES
from perception.experiments import ExperimentSuite
from perception.methods import METHODS
from perception.tables import parameters


def show(suite: ExperimentSuite, target: str) -> None:
    """Prints a table of the selected cells: parameters, trained parameters, steps, and the number of finished runs.

    For a cell that lacks data or weights, the last column has the missing option, such as --data=sst2=DIR, and trained
    parameters and steps are empty.
    """
    del target
    rows = []
    for case in suite.cases():
        missing, done = suite.missing(case), len(suite.kept(suite.stem(case)))
        name = case.backbone
        if suite.scale == "tiny":
            name = f"tiny_{BACKBONES[name].family}"
        steps = trained = None
        size, one = parameters(name)
        if not missing:
            config = suite.configuration(case, 1)
            run.validate(config)
            steps = config.train.steps
            trained = size if METHODS[case.finetune].trains_all else config.lora.rank * one
        state = f"needs {missing}" if missing else f"{min(done, suite.seeds)} of {suite.seeds} done"
        rows.append((case.backbone, case.column, case.mode, size, trained, steps, state))
    columns = ("backbone", "data", "finetuning", "parameters", "trained", "steps", "")
    print(text(columns, rows))
    print(
        "parameters: size of the backbone with its default vocabulary, without the classification head"
    )
