"""Measures the compilation of the training step of deep translators: python -m benchmarks.compilation

Initialises the model of configs/wmt_ffn_res.py and compiles its step for the bucket of 24 tokens, for a CPU, in float32
and without data. Each measurement has its own process, without a compilation cache. The two columns "before step 1"
count from the start of the process to the end of the compilation, in CPU seconds and in wall-clock seconds. Each
row has medians over the rounds. Measures unrolled and scanned layers in turns.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from common.arguments import int_arg
from common.report.table import markdown
from common.runtime import program

MEASURE = """
import json, sys, time
import jax
from common import sharding
from common.config import load
from common.train.frozen import draw_on_mesh
from common.train.state import Step
from reservoir.tasks.translation import Translation

config = load("configs/wmt_ffn_res.py")
config.model.encoder_layers, config.model.dtype = int(sys.argv[1]), "float32"
config.data.buckets, config.train.scan_layers = (24,), int(sys.argv[3])
mesh = sharding.make_mesh(config.mesh)
with jax.set_mesh(mesh):
    task = Translation(config, mesh, read_data=False)
    rows = sharding.batch_sharding(mesh)
    arrays = task.batch_spec(mesh.size).arrays.items()
    batch = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows) for name, x in arrays}
    before = time.process_time()
    step = Step.of(config, task, mesh)
    jax.block_until_ready((step.start().params, draw_on_mesh(step.abstract_model, 1, mesh)[0]))
    begun = time.process_time()
    lowered, _ = step.lower(step.task.loss, batch)
    middle = time.process_time()
    compiled = lowered.compile()
    end = time.process_time()
seconds = time.time() - float(sys.argv[2])
kernels = compiled.as_text().count(" fusion(")
memory = compiled.memory_analysis().temp_size_in_bytes / 2**30
print(json.dumps([begun - before, middle - begun, end - middle, end - begun, end, seconds, kernels, memory]))
"""
"""Program that prints the measurements of one depth. Its arguments are the number of encoder layers, the time at which
its process was started, in seconds since the epoch, and the configuration's `train.scan_layers`."""

ROOT = Path(__file__).parent.parent

SCANS = {0: "no", 1: "yes"}
"""The configuration's `train.scan_layers` -> cell of the column "scanned"."""

COLUMNS = (
    "commit",
    "layers",
    "scanned",
    "start CPU s",
    "lower CPU s",
    "compile CPU s",
    "lower and compile CPU s",
    "before step 1 CPU s",
    "before step 1 s",
    "fused kernels",
    "temporary GiB",
)


def measure(layers: int, least: int) -> list[float]:
    """Measures one compilation in a new process. Returns the values of COLUMNS except the first three.

    `least` is the configuration's `train.scan_layers`.
    """
    # Several threads of OpenBLAS would wait in busy loops, which count as CPU seconds.
    settings = {"OPENBLAS_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    settings["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    command = [sys.executable, "-c", MEASURE, str(layers), str(time.time()), str(least)]
    environment = os.environ | settings
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    from benchmarks.harness import machine, make_parser, write_json

    parser = make_parser(__doc__, "compilation", rounds=3)
    parser.add_argument(
        "--layers", type=int_arg("--layers"), nargs="+", default=[12, 32], help="encoder layers"
    )
    options = parser.parse_args()
    where = machine()
    rows = []
    for layers in options.layers:
        rounds = [[measure(layers, least) for least in SCANS] for _ in range(options.rounds)]
        for scanned, found in zip(SCANS.values(), zip(*rounds, strict=True), strict=True):
            rows.append(
                (
                    where["commit"],
                    layers,
                    scanned,
                    *map(statistics.median, zip(*found, strict=True)),
                )
            )
        print(markdown(COLUMNS, rows), flush=True)
    found = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
    write_json(options.out, {"machine": where, "rounds": options.rounds, "rows": found})


if __name__ == "__main__":
    program.run(main)
