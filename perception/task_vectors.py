"""Adds and negates task vectors of two full fine-tunings: python -m perception.task_vectors --runs RUN RUN

A task vector is the difference of fine-tuned and pretrained weights of the whole encoder (Ilharco et al., 2022). Adding
two vectors to the pretrained weights gives one encoder for two tasks. Subtracting a vector is meant to make the encoder
forget a task. Each task keeps the head of its run. Validation accuracy chooses the weight of the sum of both vectors.
The program writes test accuracies to task_vectors.csv.
"""

from collections.abc import Sequence
from pathlib import Path

from common.runtime import program
from common.variables import Params

SUMS = (0.4, 0.6, 0.8, 1.0)
"""Candidate weights of the sum of two task vectors. Validation accuracy selects one."""

NEGATIONS = (-0.5, -1.0)


def main() -> None:
    from common import config
    from common.storage.folders import open_folder, output

    parser = config.parser_for("perception.task_vectors")
    parser.add_argument(
        "--runs",
        required=True,
        nargs=2,
        type=open_folder,
        metavar="RUN",
        help="two runs with --config.finetune=full_pretrained and the same --config.pretrained",
    )
    parser.add_argument(
        "--pretrained",
        type=open_folder,
        metavar="DIR",
        help="the pretrained weights (default: the pretrained weights of the first run)",
    )
    parser.add_argument(
        "--examples",
        type=config.positive_int_arg("--examples"),
        metavar="N",
        help="use only the first N examples of each split (default: all)",
    )
    parser.add_argument(
        "--out",
        type=open_folder,
        default=Path("results/perception"),
        metavar="DIR",
        help="output folder of the table",
    )
    options = parser.parse_args()
    config.check_folder("--out", options.out)

    from common.report.table import publish

    columns, rows = measure(options.runs, options.pretrained, options.examples)
    with output(options.out):
        publish(options.out / "task_vectors", columns, rows)


def moved(base: Params, vectors: Sequence[tuple[Params, float]]) -> Params:
    """Returns the base weights plus the weighted sum of task vectors.

    Raises:
      ValueError: a vector has other parameters than the base weights.
    """
    if any(vector.keys() != base.keys() for vector, _ in vectors):
        raise ValueError("a task vector has other parameters than the base weights")
    return {name: x + sum(weight * v[name] for v, weight in vectors) for name, x in base.items()}


def vector(tuned: Params, base: Params) -> Params:
    """Returns the task vector of fine-tuned weights: their difference from the base weights.

    Raises:
      UserError: the weights have other parameters or shapes than the base weights.
    """
    from common.config import check

    one, other = ({name: x.shape for name, x in some.items()} for some in (tuned, base))
    different = sorted(n for n in one.keys() | other.keys() if one.get(n) != other.get(n))
    check(
        not different,
        f"the fine-tuned weights are not those of the pretrained model: {', '.join(different[:3])} differ",
    )
    return {name: tuned[name] - x for name, x in base.items()}


def measure(
    runs: Sequence[Path], pretrained: Path | None = None, examples: int | None = None
) -> tuple[tuple[str, ...], list[tuple]]:
    """Returns the columns and rows of the table: accuracy on the test examples of both tasks, in percent."""
    from common.config import check
    from common.sharding import make_mesh
    from perception import loading
    from perception.adapter_commands import wanted_parameters
    from perception.encoder_evaluation import EncoderEvaluation
    from perception.hugging_face import open_model

    for run in runs:
        way = loading.read(run, "--runs").finetune
        check(
            way == "full_pretrained",
            f"--runs {run} has --config.finetune={way}: a task vector needs full_pretrained",
        )
    mesh = make_mesh({"data": -1})
    named = pretrained or Path(loading.read(runs[0], "--runs").pretrained)
    model = open_model(named, "--pretrained")
    base = model.load(wanted_parameters(model.shape, mesh))
    tasks = [EncoderEvaluation(run, mesh, examples) for run in runs]
    vectors = [vector(task.encoder, base) for task in tasks]

    def accuracies(weights: Sequence[float], split: str) -> tuple[float, ...]:
        encoder = moved(base, list(zip(vectors, weights, strict=True)))
        return tuple(task(encoder, split).metrics()["accuracy"] for task in tasks)

    chosen = max(SUMS, key=lambda weight: sum(accuracies((weight, weight), "valid")))
    print(f"weight of the sum, chosen by the mean accuracy on validation: {chosen:g}", flush=True)
    names = [run.name for run in runs]
    plan = [("pretrained", (0.0, 0.0))]
    plan += [(f"+ {names[0]}", (1.0, 0.0)), (f"+ {names[1]}", (0.0, 1.0))]
    plan += [(f"+ {names[0]} + {names[1]}", (chosen, chosen))]
    for weight in NEGATIONS:
        plan += [(f"- {names[0]}", (weight, 0.0)), (f"- {names[1]}", (0.0, weight))]
    rows = []
    for name, weights in plan:
        rows.append((name, *weights, *accuracies(weights, "test")))
        print(*rows[-1], flush=True)
    columns = ("encoder", *(f"weight of {name}" for name in names))
    return (*columns, *(f"test accuracy, {name}" for name in names)), rows


if __name__ == "__main__":
    program.run(main)
