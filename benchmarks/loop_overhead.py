"""Times the training loop and the data pipeline against the compiled step: python -m benchmarks.loop_overhead

Trains the tiny translation model, whose steps are short. The bare step repeats one batch on the device. The training
loop also reads and transfers data, reads metrics, logs and shows progress. Evaluation, compilation and checkpoints are
excluded.
"""

import time
from dataclasses import replace

from common.arguments import int_arg
from common.runtime import program

TARGETS = {"loop over bare step": 0.95, "data over model": 10.0}
"""Name of a ratio of two throughputs -> the smallest ratio that meets the target."""


def main() -> None:
    from benchmarks.harness import machine, make_parser, write_json

    parser = make_parser(__doc__, "loop_overhead", rounds=5)
    parser.add_argument("--steps", type=int_arg("--steps"), default=100, help="steps per round")
    options = parser.parse_args()

    import jax
    import numpy as np

    from benchmarks import tiny_run
    from common.train.prefetch import put

    with tiny_run.tiny_run() as run:
        task = run.task
        tiny_run.train(run, 10)
        batch = put(next(task.batches(None))[0], run.mesh)
        weight = int(np.count_nonzero(batch["target_outputs"]))

        def bare(steps: int) -> float:
            started = time.perf_counter()
            state = replace(run.train_state, step=0)
            for _ in range(steps):
                metrics = run.train_step(state, run.frozen, batch)
            run.train_state = replace(state, step=run.step)
            jax.block_until_ready(metrics)
            return steps * weight / (time.perf_counter() - started)

        def data(steps: int) -> float:
            batches = task.batches(None)
            started, tokens = time.perf_counter(), 0
            for _ in range(steps):
                tokens += int(np.count_nonzero(next(batches)[0]["target_outputs"]))
            return tokens / (time.perf_counter() - started)

        rounds = [
            {
                "loop": tiny_run.train(run, options.steps),
                "bare step": bare(options.steps),
                "data": data(options.steps),
            }
            for _ in range(options.rounds)
        ]
    ratios = {
        "loop over bare step": float(np.median([r["loop"] / r["bare step"] for r in rounds])),
        "data over model": float(np.median([r["data"] / r["bare step"] for r in rounds])),
    }
    for name in ("loop", "bare step", "data"):
        print(
            f"{name:12s} {np.median([r[name] for r in rounds]):12,.0f} target-side tokens/s (median)"
        )
    for name, value in ratios.items():
        met = "yes" if value >= TARGETS[name] else "no"
        print(f"{name:22s} {value:8.3f}   target >= {TARGETS[name]:g}   met {met}")
    record = {
        "machine": machine(),
        "tokens_per_second": rounds,
        "ratios": ratios,
        "targets": TARGETS,
    }
    write_json(options.out, record)


if __name__ == "__main__":
    program.run(main)
