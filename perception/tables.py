"""Tables 1 and 2, measured beside printed."""

import itertools
import sys
from functools import cache

import jax
import numpy as np
from flax import nnx

from common import variables
from common.errors import UserError
from common.report.table import mean_std
from perception import printed
from perception.backbones import BACKBONES
from perception.experiments import ExperimentSuite, f1
from perception.lora import Lora, adapt
from perception.model import backbone

RANKS = (2, 4, 8, 16, 32)


def shortened(number: int) -> str:
    """As the paper writes numbers of parameters: 162.56K, 1.3M, 7.24B."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.2f}".rstrip("0").rstrip(".") + unit
    return str(number)


@cache
def parameters(name: str) -> tuple[int, int]:
    """Of a backbone, and of adapters of rank 1 on the layers that the paper adapts. Nothing is allocated."""
    shape = BACKBONES[name]

    def adapted() -> nnx.Module:
        model = backbone(shape, rngs=variables.ParamKeys(0))
        adapt(model, shape.targets, Lora(rank=1), rngs=variables.ParamKeys(0))
        return model

    counts = variables.count(variables.abstract(adapted))
    return counts["frozen"], counts["trainable"]


def table1(suite: ExperimentSuite) -> None:
    """Weighted F1 of every cell that can be run, at the best and at the last step; the others stay empty, and so does
    one whose data or weights are at fault, or that no memory is left for. It is written after each row.

    With `turns` or a `sweep` all cells are trained together, and a fault of one ends it.

    The mean is that of the columns that are shown, where a row has them all.

    Raises:
      UserError: there are cells that failed; everything else has been done and written.
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
                # Python's own has nothing to say.
                why = str(fault).partition("\n")[0] or "out of memory"
                failed.append(f"{backbone_} {mode} on {case.dataset}: {why}")
                print(f"error: {why}; the cell stays empty", file=sys.stderr, flush=True)
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
        suite.keep("table1", header, rows)
    suite.write("table1", header, rows)
    if missing:
        print(f"{sum(missing.values())} of {len(cases)} cells are empty for want of")
        print("".join(f"  {why} ({count})\n" for why, count in missing.items()), end="")
    if failed:
        print("failed:")
        print("".join(f"  {line}\n" for line in failed), end="")
        raise UserError(f"{len(failed)} of {len(cases)} cells failed and are empty")


def table2(suite: ExperimentSuite) -> None:
    """Parameters of every backbone and of its adapters, counted, and as printed where it is.

    "Original" has an output layer of its own, as large as the table of the embeddings. Adapters grow with their rank,
    so one count serves all ranks. The share is that of rank 32 in the backbone without an output layer.
    """
    paper, rows, same, entries = printed.table2(), [], 0, 0
    for name, shape in BACKBONES.items():
        if name.startswith("tiny_"):
            continue
        size, one = parameters(name)
        counts = (size + shape.vocabulary * shape.width, *(rank * one for rank in RANKS))
        rows.append((name, "counted", *counts, f"{100 * RANKS[-1] * one / size:.2f} %"))
        if cells := paper.get(name):
            given = [(cell, n) for cell, n in zip(cells, counts, strict=False) if cell]
            entries += len(given)
            same += sum(shortened(n) == cell for cell, n in given)
            rows.append((name, "printed", *(cell or None for cell in cells), None, None))
    suite.write("table2", ("backbone", "", "original", *(f"r = {r}" for r in RANKS), "share"), rows)
    print(f"{same} of {entries} printed entries are the counted ones")
