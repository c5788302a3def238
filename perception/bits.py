"""Measures how quantizing a trained classifier changes its F1: python -m perception.bits --run=RUN

    python -m perception.train --config=configs/perception.py:laptop --config.backbone=auto --config.pretrained=DIR \\
        --config.finetune=full_pretrained --config.data.source=files:DATA --workdir=runs/a
    python -m perception.bits --run=runs/a --out=results/perception

Stores the encoder of a run with its kernels in each format (float32, bfloat16, int8, NF4, 4 bits with a minimum), reads
it back, and classifies the test examples with the run's head in float32. Writes bits.csv and bits.md.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

from common.runtime import program

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
)


def main() -> None:
    from common import config
    from common.storage.folders import open_folder, output

    parser = config.parser_for("perception.bits")
    parser.add_argument(
        "--run",
        required=True,
        type=open_folder,
        metavar="DIR",
        help="a run that trained all weights",
    )
    parser.add_argument(
        "--examples",
        type=config.positive_int_arg("--examples"),
        metavar="N",
        help="evaluate only the first N test examples (default: all)",
    )
    parser.add_argument(
        "--out",
        type=open_folder,
        default=Path("results/perception"),
        metavar="DIR",
        help="directory for bits.csv and bits.md",
    )
    options = parser.parse_args()
    config.check_folder("--out", options.out)

    from common.report.table import publish

    rows = measure(options.run, options.examples)
    with output(options.out):
        publish(options.out / "bits", COLUMNS, rows)


def measure(run: Path, examples: int | None = None) -> list[tuple]:
    """Returns one row for each format, with the columns COLUMNS.

    The difference from float32 has a 95 % interval from a paired bootstrap over the test examples.
    """
    import numpy as np

    from common.report.verdict import resample
    from common.sharding import make_mesh
    from perception.adapter_commands import wanted_parameters
    from perception.encoder_evaluation import EncoderEvaluation
    from perception.hugging_face import export, open_model
    from perception.quantized import CODES, SCALES
    from perception.quantized_files import FORMATS, write

    mesh = make_mesh({"data": -1})
    evaluation = EncoderEvaluation(run, mesh, examples)
    wanted = wanted_parameters(evaluation.shape, mesh)
    kernels = [name for name in wanted if name.endswith("/kernel")]
    weights = sum(wanted[name].size for name in kernels)
    found, sizes = {}, {}
    with TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        export(base, evaluation.shape, evaluation.encoder)
        for kind in FORMATS:
            written = Path(folder) / kind
            write(written, open_model(base), wanted, kind, ())
            model = open_model(written)
            files, encoder = model.files, model.load(wanted)
            packed = [name for name in files.names if name.endswith((CODES, SCALES))]
            stored = packed or model.stored_names(kernels)
            sizes[kind] = (
                8 * sum(files.tensor(name).size for name in stored) / weights,
                sum(files.tensor(name).size for name in files.names) / 1e6,
                100 * _error(encoder, evaluation.encoder, kernels),
            )
            found[kind] = evaluation(encoder, "test")
            print(f"{kind}: {found[kind].metrics()}", flush=True)
    metrics = {kind: one.metrics() for kind, one in found.items()}
    resampled = dict(zip(found, resample(list(found.values())), strict=True))
    plain, rows = found["float32"], []
    for kind, one in found.items():
        difference_B = resampled[kind]["weighted_f1"] - resampled["float32"]["weighted_f1"]
        low, high = np.quantile(difference_B, (0.025, 0.975))
        rows.append(
            (
                kind,
                *sizes[kind],
                metrics[kind]["accuracy"],
                metrics[kind]["weighted_f1"],
                metrics[kind]["weighted_f1"] - metrics["float32"]["weighted_f1"],
                float(low),
                float(high),
                100 * float((one.guesses_M != plain.guesses_M).mean()),
            )
        )
    return rows


def _error(encoder: dict, base: dict, kernels: list[str]) -> float:
    """Returns the Frobenius norm of the differences of all kernels, divided by the norm of the kernels in `base`."""
    import jax.numpy as jnp

    square = sum(float(jnp.square(encoder[name] - base[name]).sum()) for name in kernels)
    return (square / sum(float(jnp.square(base[name]).sum()) for name in kernels)) ** 0.5


if __name__ == "__main__":
    program.run(main)
