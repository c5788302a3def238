"""Writes Table 1 (F1) and Table 2 (numbers of parameters), with our values beside the values printed in the paper."""

import itertools
import sys
from functools import cache

import jax
import numpy as np
from flax import nnx

from common import variables
from common.errors import UserError
from common.model.low_rank import Lora, adapt
from common.report.table import keep, mean_std
from perception import printed
from perception.backbones import BACKBONES
from perception.experiments import ExperimentSuite, f1
from perception.model import backbone

RANKS = (2, 4, 8, 16, 32)


def shortened(number: int) -> str:
    """Formats a number of parameters as in the paper: 162.56K, 1.3M, 7.24B."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.2f}".rstrip("0").rstrip(".") + unit
    return str(number)


@cache
def parameters(name: str) -> tuple[int, int]:
    """Counts the parameters of a backbone, and of rank-1 adapters on its `targets`, without allocating them."""
    shape = BACKBONES[name]

    def adapted(rngs: variables.ParamKeys) -> nnx.Module:
        model = backbone(shape, rngs=rngs)
        adapt(model, shape.targets, Lora(rank=1), rngs=rngs)
        return model

    counts = variables.count(variables.abstract(adapted))
    return counts["frozen"], counts["trainable"]


def table1(suite: ExperimentSuite) -> None:
    """Writes the weighted F1 of every cell at the best and the last step, and the paper's F1.

    A cell is a backbone, a finetuning method and a data set. The files are updated after the cells of each backbone and
    finetuning method. A cell stays empty if its data or weights are missing, or if its training raises a UserError, a
    MemoryError or a JaxRuntimeError. With `turns` or a `sweep`, all cells are trained together, and one failure ends
    the command. A row has a mean only if all its cells have values.

    Raises:
      UserError: the configuration of a cell is invalid (then no cell is trained), or a cell failed. If a cell failed
        without `turns` and `sweep`, all other cells have been trained and written.
    """
    suite.check()
    paper, rows, missing, failed = printed.table1(), [], {}, []
    cases = suite.cases()
    columns = tuple(dict.fromkeys(case.column for case in cases))
    header = ("backbone", "finetuning", "", *columns, "mean")
    together = suite.summaries(cases) if suite.turns or suite.sweep else {}
    for (backbone_, mode), cells in itertools.groupby(cases, lambda c: (c.backbone, c.mode)):
        found = {}
        for case in cells:
            try:
                found[case.column] = (together or suite.summaries([case]))[case]
            except (UserError, MemoryError, jax.errors.JaxRuntimeError) as fault:
                found[case.column] = []
                # A MemoryError of Python has an empty message: write "out of memory" instead.
                why = str(fault).partition("\n")[0] or "out of memory"
                failed.append(f"{backbone_} {mode} on {case.dataset}: {why}")
                print(f"error: {failed[-1]}; the cell stays empty", file=sys.stderr, flush=True)
            if why := suite.missing(case):
                missing[why] = missing.get(why, 0) + 1
        for name, which in (("best step", "test"), ("last step", "test_last")):
            values = [f1(found[column], which) for column in columns]
            mean = f"{np.mean([np.mean(v) for v in values]):.1f}" if all(values) else None
            rows.append(
                (backbone_, mode, name, *(mean_std(v) if v else None for v in values), mean)
            )
        if columns[0] in (line := paper.get((backbone_, mode), {})):
            values = [line[column] for column in columns]
            cells = (f"{value:.1f}" for value in (*values, float(np.mean(values))))
            rows.append((backbone_, mode, "printed", *cells))
        keep(suite.out / "table1", header, rows)
    suite.write("table1", header, rows)
    if missing:
        print(
            f"{sum(missing.values())} of {len(cases)} cells lack a value, because these options are missing:"
        )
        print("".join(f"  {why} ({count})\n" for why, count in missing.items()), end="")
    if failed:
        print("failed:")
        print("".join(f"  {line}\n" for line in failed), end="")
        raise UserError(
            f"{len(failed)} of {len(cases)} cells of table1 failed: correct the errors listed above, and run the"
            " command again"
        )


def table2(suite: ExperimentSuite) -> None:
    """Writes the parameter counts of every backbone, except the tiny ones, and of its adapters: ours and the paper's.

    The column "original" includes an untied output layer. Adapter parameters are proportional to the rank. The column
    "share" is the number of adapter parameters with rank 32, in percent of the parameters of the backbone without an
    output layer.
    """
    paper, rows, same, entries = printed.table2(), [], 0, 0
    for name, shape in BACKBONES.items():
        if name.startswith("tiny_"):
            continue
        size, one = parameters(name)
        counts = (size + shape.vocabulary * shape.width, *(rank * one for rank in RANKS))
        rows.append((name, "counted", *counts, f"{100 * RANKS[-1] * one / size:.2f} %"))
        if cells := paper.get(name):
            pairs = [(cell, n) for cell, n in zip(cells, counts, strict=False) if cell]
            entries += len(pairs)
            same += sum(shortened(n) == cell for cell, n in pairs)
            rows.append((name, "printed", *(cell or None for cell in cells), None, None))
    suite.write("table2", ("backbone", "", "original", *(f"r = {r}" for r in RANKS), "share"), rows)
    print(f"{same} of {entries} printed entries equal the counted entries")
