"""Adds and negates task vectors of two full fine-tunings: python -m perception.task_vectors --runs RUN RUN

    python -m perception.task_vectors --runs runs/a_seed1 runs/b_seed1 --runs runs/a_seed2 runs/b_seed2

A task vector is the difference of fine-tuned and pretrained weights of the whole encoder (Ilharco et al., 2022). Adding
two vectors to the pretrained weights gives one encoder for two tasks. Subtracting a vector is meant to make the encoder
forget a task. Each task keeps the head of its run. The weight of the sum of both vectors is the candidate with the best
mean validation accuracy of both tasks. Writes test accuracies to task_vectors.csv and task_vectors.md; with several
pairs of runs, their means and standard deviations over the pairs.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from common.runtime import program
from common.variables import Params

if TYPE_CHECKING:
    from jax.sharding import Mesh

SUMS = (0.4, 0.6, 0.8, 1.0)
"""Candidate weights of the sum of two task vectors."""

NEGATIONS = (-0.5, -1.0)


def main() -> None:
    from common import config
    from common.storage.folders import open_folder, output
    from perception.encoder_evaluation import parse

    parser = config.parser_for("perception.task_vectors", __doc__)
    parser.add_argument(
        "--runs",
        required=True,
        action="append",
        nargs=2,
        type=open_folder,
        metavar="RUN",
        help="two runs with --config.finetune=full_pretrained and the same --config.pretrained; repeat the option for"
        " runs of the same two tasks with other seeds",
    )
    options, mesh = parse(parser, "task_vectors.csv and task_vectors.md")

    from common.report.table import publish

    columns, rows = measure(options.runs, mesh, options.pretrained, options.examples)
    with output(options.out):
        publish(options.out / "task_vectors", columns, rows)


def moved(base: Params, vectors: Sequence[tuple[Params, float]]) -> Params:
    """Returns the base weights plus the weighted sum of task vectors, which have the same parameter names."""
    return {name: x + sum(weight * v[name] for v, weight in vectors) for name, x in base.items()}


def vector(tuned: Params, base: Params, run: str = "the run") -> Params:
    """Returns the task vector of fine-tuned weights: `tuned` minus `base`, by parameter name.

    Raises a UserError that names `run` if names or shapes of the parameters differ.
    """
    from common.errors import check

    one, other = ({name: x.shape for name, x in some.items()} for some in (tuned, base))
    different = sorted(n for n in one.keys() | other.keys() if one.get(n) != other.get(n))
    check(
        not different,
        f"the weights of {run} do not fit the pretrained model (parameters with another name or shape:"
        f" {', '.join(different[:3])}{f' and {len(different) - 3:,} more' if len(different) > 3 else ''}): set"
        " --pretrained=DIR to the model from which the run started, or name a run without --config.reinitialize",
    )
    return {name: tuned[name] - x for name, x in base.items()}


def measure(
    pairs: Sequence[Sequence[Path]],
    mesh: "Mesh",
    pretrained: Path | None = None,
    examples: int | None = None,
) -> tuple[tuple[str, ...], list[tuple]]:
    """Returns the columns and rows of the table: accuracy on the test examples of both tasks, in percent.

    With several pairs of runs, a row has the mean and standard deviation over the pairs.

    Args:
      pairs: pairs of runs. The first runs of all pairs have the same task, and so have the second runs.
      pretrained: the pretrained weights from which all runs started; None for the weights that their configurations
        name.
      examples: number of examples to evaluate, from the start of each split; None for all.

    Raises:
      UserError: a run or its pretrained weights are unsuitable, the two runs of a pair started from different weights,
        or two pairs have different test examples.
    """
    from common.errors import check
    from common.report.table import mean_std
    from common.storage.addresses import shown

    tables, known = [], None
    for pair in pairs:
        tasks, table = _pair(pair, mesh, pretrained, examples)
        known = known or tasks
        check(
            tasks == known,
            f"--runs {' '.join(map(shown, pair))} and the first --runs have different test examples: give all pairs the"
            " same two tasks in the same order",
        )
        tables.append(table)
    names = [re.sub(r"_seed\d+$", "", run.name) for run in pairs[0]]
    columns = ("encoder", *(f"weight of {name}" for name in names))
    columns += tuple(f"test accuracy, {name}" for name in names)
    rows = []
    for number, (signs, *_) in enumerate(tables[0]):
        weights, accuracies = (
            list(zip(*(table[number][part] for table in tables), strict=True)) for part in (1, 2)
        )
        name = " ".join(f"{sign} {task}" for sign, task in zip(signs, names, strict=True) if sign)
        if len(pairs) == 1:
            rows.append(
                (name or "pretrained", *(w for (w,) in weights), *(a for (a,) in accuracies))
            )
            continue
        chosen = (", ".join(f"{w:g}" for w in sorted(set(some))) for some in weights)
        rows.append((name or "pretrained", *chosen, *map(mean_std, accuracies)))
    return columns, rows


Signs = tuple[str, str]


def _pair(
    runs: Sequence[Path], mesh: "Mesh", pretrained: Path | None, examples: int | None
) -> tuple[list[str], list[tuple[Signs, tuple[float, float], tuple[float, ...]]]]:
    """Returns the fingerprints of the test examples of both tasks, and the rows of the table for a pair of runs.

    Each row evaluates the base weights plus a weighted sum of the two task vectors. A row is (signs of the vectors,
    weights of the vectors, test accuracies of both tasks). A vector with the weight 0 has the sign "".
    """
    from common.errors import check
    from common.storage.addresses import shown
    from common.storage.folders import open_folder
    from perception import loading
    from perception.adapter_commands import wanted_parameters
    from perception.encoder_evaluation import EncoderEvaluation
    from perception.hugging_face import open_model
    from perception.methods import find

    configs = [loading.read(run, "--runs") for run in runs]
    for run, config in zip(runs, configs, strict=True):
        method = find(config.finetune)
        check(
            method.trains_all and method.pretrained,
            f"--runs {shown(run)} has --config.finetune={config.finetune}, but a task vector needs a run with"
            " --config.finetune=full_pretrained: name such a run",
        )
        check(
            config.eval.select == "valid",
            f"--runs {shown(run)} has --config.eval.select=test, but the weight of the sum of task vectors is chosen on"
            " validation examples: name a run with --config.eval.select=valid",
        )
    started = [pretrained or open_folder(config.pretrained) for config in configs]
    model, other = (open_model(weights, "--pretrained") for weights in started)
    check(
        started[0] == started[1] or model.fingerprint == other.fingerprint,
        f"--runs {shown(runs[0])} started from the weights in {shown(started[0])}, and {shown(runs[1])} from other"
        f" weights in {shown(started[1])}: name two runs from the same weights, or set --pretrained=DIR if both runs"
        " started from the weights in DIR",
    )
    base = model.load(wanted_parameters(model.shape, mesh))
    tasks = [EncoderEvaluation(run, mesh, examples, pretrained) for run in runs]
    vectors = [
        vector(task.encoder, base, f"--runs {shown(run)}")
        for run, task in zip(runs, tasks, strict=True)
    ]

    def accuracies(weights: Sequence[float], split: str) -> tuple[float, ...]:
        encoder = moved(base, list(zip(vectors, weights, strict=True)))
        return tuple(task(encoder, split).metrics()["accuracy"] for task in tasks)

    chosen = max(SUMS, key=lambda weight: sum(accuracies((weight, weight), "valid")))
    print(f"weight of the sum, chosen by the mean validation accuracy: {chosen:g}", flush=True)
    plan = [(("", ""), (0.0, 0.0)), (("+", ""), (1.0, 0.0)), (("", "+"), (0.0, 1.0))]
    plan += [(("+", "+"), (chosen, chosen))]
    for weight in NEGATIONS:
        plan += [(("-", ""), (weight, 0.0)), (("", "-"), (0.0, weight))]
    table = []
    for signs, weights in plan:
        table.append((signs, weights, accuracies(weights, "test")))
        print(f"weights {weights}: test accuracies {table[-1][2]}", flush=True)
    return [task.fingerprint for task in tasks], table


if __name__ == "__main__":
    program.run(main)
