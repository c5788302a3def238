"""Measures how quantizing trained classifiers changes their F1: python -m perception.bits --runs RUN RUN RUN

    python -m perception.train --config=configs/perception.py:laptop --config.backbone=auto --config.pretrained=DIR \\
        --config.finetune=full_pretrained --config.data.source=files:DATA --workdir=runs/a
    python -m perception.bits --runs runs/a --out=runs/bits

Stores the encoder of each run with its kernels in each format: float32, bfloat16, int8, NF4, and 4 bits with 16 evenly
spaced levels from the minimum to the maximum of a block. Reads the stored encoder, and classifies the test examples
with the run's head in float32. Writes bits.csv and bits.md with means over the runs. A verdict on a format needs at
least three runs, which must differ in the seed (not checked).
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from common.runtime import program

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from common.metrics.classes import Classes

METRIC = "weighted_f1"

COLUMNS = (
    "format",
    "bits of a kernel's weight",
    "MB of the file",
    "error of kernels (% of the norm)",
    "test accuracy",
    "test weighted F1",
    "minus float32",
    "95 % from",
    "to",
    "changed predictions (%)",
    "verdict",
)


def main() -> None:
    from common import config
    from common.storage.folders import open_folder, output
    from perception.encoder_evaluation import parse

    parser = config.parser_for("perception.bits", __doc__)
    parser.add_argument(
        "--runs",
        required=True,
        nargs="+",
        type=open_folder,
        metavar="RUN",
        help="runs that trained all weights, with different seeds",
    )
    options, mesh = parse(parser, "bits.csv and bits.md")

    from common.report.table import publish

    rows = measure(options.runs, mesh, options.examples, options.pretrained)
    with output(options.out):
        publish(options.out / "bits", COLUMNS, rows)


def measure(
    runs: Sequence[Path],
    mesh: "Mesh",
    examples: int | None = None,
    pretrained: Path | None = None,
) -> list[tuple]:
    """Returns one row for each format, with the columns COLUMNS. Sizes, errors and scores are means over the runs.

    Holm's method corrects the verdicts, but not the intervals, for the number of formats. `EncoderEvaluation` documents
    `examples` and `pretrained`.

    Raises:
      UserError: a run is given twice, `EncoderEvaluation` rejects a run, or two runs have different test examples.
    """
    import numpy as np

    from common.errors import check
    from common.report.significance import LEAST_SEEDS, MARGINS, correct
    from common.storage.addresses import shown
    from perception.conclusions import compare_within_runs

    folders = [run.resolve() for run in runs]
    twice = dict.fromkeys(shown(run) for run in runs if folders.count(run.resolve()) > 1)
    check(
        not twice,
        f"--runs names a run more than once ({', '.join(twice)}): name each run once",
    )
    found: dict[str, list[Classes]] = {}
    sizes: dict[str, list[tuple[float, ...]]] = {}
    for run in runs:
        for kind, size, predicted in quantize(run, mesh, examples, pretrained):
            sizes.setdefault(kind, []).append(size)
            found.setdefault(kind, []).append(predicted)
            check(
                predicted.pairing == found["float32"][0].pairing,
                f"--runs {shown(run)} and {shown(runs[0])} have different test examples: name runs on the same data",
            )
            print(f"{run.name}, {kind}: {predicted.metrics()}", flush=True)
    plain = found["float32"]
    compared = {
        kind: compare_within_runs(some, plain, MARGINS[METRIC])
        for kind, some in found.items()
        if kind != "float32"
    }
    corrected = dict(zip(compared, correct(list(compared.values())), strict=True))
    rows = []
    for kind, some in found.items():
        one = corrected.get(kind)
        metrics = [predicted.metrics() for predicted in some]
        means = (float(np.mean([m[name] for m in metrics])) for name in ("accuracy", METRIC))
        difference = (one.difference, one.low, one.high) if one else (0.0, 0.0, 0.0)
        changed = [(a.guesses_E != b.guesses_E).mean() for a, b in zip(some, plain, strict=True)]
        few = LEAST_SEEDS - len(runs)
        verdict = f"undecided (at least {few} more seed{'s' * (few != 1)})" if few > 0 else str(one)
        size = np.mean(sizes[kind], axis=0).tolist()
        changed_percent = 100 * float(np.mean(changed))
        rows.append((kind, *size, *means, *difference, changed_percent, verdict if one else ""))
    return rows


def quantize(
    run: Path, mesh: "Mesh", examples: int | None, pretrained: Path | None
) -> "Iterator[tuple[str, tuple[float, ...], Classes]]":
    """Yields (format, size, test predictions) for each format of the encoder.

    A size is (bits per weight of the kernels, with scales; MB of all tensors of the encoder; relative error of the
    kernels in percent).
    """
    from perception.adapter_commands import wanted_parameters
    from perception.encoder_evaluation import EncoderEvaluation
    from perception.hugging_face import export, open_model
    from perception.quantized import CODES, SCALES
    from perception.quantized_files import FORMATS, write

    evaluation = EncoderEvaluation(run, mesh, examples, pretrained)
    wanted = wanted_parameters(evaluation.shape, mesh)
    kernels = [name for name in wanted if name.endswith("/kernel")]
    weights = sum(wanted[name].size for name in kernels)
    with TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        export(base, evaluation.shape, evaluation.encoder)
        for kind in FORMATS:
            written = Path(folder) / kind
            write(written, open_model(base), wanted, kind)
            model = open_model(written)
            files, encoder = model.files, model.load(wanted)
            packed = [name for name in files.names if name.endswith((CODES, SCALES))]
            stored = packed or model.stored_names(kernels)
            size = (
                8 * sum(files.tensor(name).size for name in stored) / weights,
                sum(files.tensor(name).size for name in files.names) / 1e6,
                100 * _error(encoder, evaluation.encoder, kernels),
            )
            yield kind, size, evaluation(encoder, "test")


def _error(encoder: dict, base: dict, kernels: list[str]) -> float:
    """Returns the Frobenius norm of the errors of all kernels, divided by the norm of the kernels in `base`."""
    import jax.numpy as jnp

    square = sum(float(jnp.square(encoder[name] - base[name]).sum()) for name in kernels)
    return (square / sum(float(jnp.square(base[name]).sum()) for name in kernels)) ** 0.5


if __name__ == "__main__":
    program.run(main)
