"""Times our training steps on one GPU against PyTorch's, in bfloat16: python -m benchmarks.accelerator

Uses the training steps of `benchmarks.step` with larger batches and a BERT of base size. The text classifiers use AdamW
instead of Adafactor, because transformers' Adafactor is a slow loop over the parameters. A row of the table is a
recipe. Its cases are our step, PyTorch's eager step, and PyTorch's step with `torch.compile`. PyTorch uses autocast,
fused attention, and fused Adam or AdamW.

A timed call runs several steps and waits only for the last. The cases of a row take turns: one call runs at a time.
Every case has its own process. The processes of a group of rows (GROUPS) compile at the same time and share the GPU's
memory. Model FLOPs utilisation (MFU) divides the FLOPs of our step's matrix products (`common.train.flops`) by the time
of a step, ours or PyTorch's, and by the FLOP/s that JAX reaches in a large bfloat16 matrix product.

If a case fails before it is timed, the program prints the error and times all other cases. If a process ends while its
row is timed, no case of the row gets times. The program writes its results after every group.

Without a GPU, the program runs on the CPU: use --batch_factor=0.01 --product=512.
"""

import os
import sys
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median
from typing import NamedTuple

from benchmarks.harness import (
    Seconds,
    check_installed,
    compare,
    interval,
    isolated,
    make_parser,
    ratios,
    report,
)
from benchmarks.step import make_our_step, make_peer
from common.arguments import float_arg, int_arg
from common.errors import check
from common.report import table
from common.runtime import program


class Row(NamedTuple):
    """A recipe of `benchmarks.step` with a larger batch, for a GPU.

    Attributes:
      model: sizes and dropout of the model, as text for the table.
      batch, length: rows of a batch, and tokens of a row.
      options: further options of `make_our_step` and `make_peer`.
    """

    model: str
    batch: int
    length: int
    options: Mapping[str, object] = {}


_ADAMW = {"optimizer": "adamw"}
_BASE = {"sizes": (12, 768, 3072, 12, 30_522), **_ADAMW}

ROWS = {
    "translation": Row("8 and 2 layers of 512, dropout 0.3", 512, 32),
    "reservoirs": Row("the same, 2 FFN reservoirs", 512, 32),
    "gmlp": Row("4 layers of 512, dropout 0.1", 32, 768),
    "gpt": Row("4 layers of 512, dropout 0.1", 32, 768),
    "bert_full": Row("12 layers of 768, dropout 0.1", 128, 128, _BASE),
    "bert_lora": Row("the same, adapters of rank 32 with dropout 0.05", 128, 128, _BASE),
    "qwen2_full": Row("4 layers of 256, no dropout", 128, 128, _ADAMW),
    "qwen2_lora": Row("the same, adapters of rank 32 with dropout 0.05", 128, 128, _ADAMW),
}

GROUPS = (
    ("translation", "reservoirs", "gpt", "bert_full"),
    ("gmlp", "bert_lora", "qwen2_full", "qwen2_lora"),
)
"""Groups of rows. The processes of a group together need at most 60 GB of GPU memory, by our estimate."""

CASES = ("ours", "PyTorch", "torch.compile")
PRODUCT = "product"  # case of the large matrix product
PRODUCTS = 20  # matrix products in a timed call
WARMUP = 2  # untimed calls of each case after it is built

Case = tuple[Callable[[], object], Callable[[], dict]]
"""A function to time, and a function that returns a dictionary of results of the case.

The dictionary has some of the keys "flops", "peak_bytes", "device" and "error".
"""


def make_case(recipe: str, case: str, batch: int, steps: int) -> Case:
    """Returns the `Case` that runs `steps` steps. `recipe` is a key of ROWS, `case` one of CASES, `batch` in rows."""
    options = {"batch": batch, **ROWS[recipe].options}
    if case == "ours":
        step = make_our_step(recipe, "bfloat16", **options)
        return partial(step, steps), lambda: {"flops": steps * step.flops, **_jax_device()}
    import torch

    gpu = torch.cuda.is_available()
    torch.set_float32_matmul_precision("high")
    options |= {"device": "cuda" if gpu else "cpu", "compiled": case == "torch.compile"}
    step = make_peer(recipe, "bfloat16", steps=steps, **options)

    def notes() -> dict:
        torch.cuda.empty_cache()  # Free cached GPU memory for the processes of the other cases.
        return {"peak_bytes": torch.cuda.max_memory_allocated() if gpu else None}

    return step, notes


def make_product(size: int) -> Case:
    """Makes the case of `PRODUCTS` bfloat16 products of matrices (size, size)."""
    import jax
    import jax.numpy as jnp

    x, y = jax.random.normal(jax.random.key(0), (2, size, size), jnp.bfloat16)
    multiply = jax.jit(jnp.matmul)

    def run() -> None:
        for _ in range(PRODUCTS):
            last = multiply(x, y)
        last.block_until_ready()

    return run, lambda: {"flops": PRODUCTS * 2 * size**3, **_jax_device()}


def _jax_device() -> dict[str, object]:
    import jax

    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    return {"device": device.device_kind, "peak_bytes": stats.get("peak_bytes_in_use")}


def attempt(make: Callable[[], Case]) -> Case:
    """Makes a case and warms it up. If this fails, returns a case whose second function returns {"error": one line}."""
    try:
        run, notes = make()
        for _ in range(WARMUP):
            run()
    except Exception as error:
        line = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
        return (lambda: None), lambda: {"error": line}
    return run, notes


def measure(
    rows: Mapping[str, Mapping[str, Callable[[], Case]]], rounds: int
) -> tuple[dict[str, Seconds], dict[str, dict]]:
    """Builds all cases of all rows at the same time, then times one row after the other.

    Args:
      rows: {row: {case: picklable function that makes the case}}. No two rows share the name of a case.

    Returns:
      {case: seconds of its calls}, without cases that have an error; {case: result of the second function of its
      `Case`, or {"error": one line}}.
    """
    makes = {name: make for cases in rows.values() for name, make in cases.items()}
    factories = {(name, f"{name}: notes"): partial(attempt, make) for name, make in makes.items()}
    timings, notes = {}, {}

    def read(name: str) -> dict:
        try:
            return calls[f"{name}: notes"]()
        except (EOFError, OSError):
            return {"error": "its process ended, possibly for lack of memory"}

    with isolated(factories) as calls, ThreadPoolExecutor(len(makes)) as threads:
        notes |= zip(makes, threads.map(read, makes), strict=True)
        for row, names in rows.items():
            alive = {name: calls[name] for name in names if "error" not in notes[name]}
            try:
                timings |= compare(alive, rounds=rounds, warmup=1) if alive else {}
                notes |= {name: read(name) for name in alive}
            except (EOFError, OSError):
                notes |= {name: {"error": f"a process of {row} ended"} for name in alive}
    for name, note in notes.items():
        if "error" in note:
            print(f"{name}: {note['error']}", file=sys.stderr, flush=True)
    return timings, notes


def markdown(record: Mapping) -> str:
    """Returns a Markdown page. `record` is the content of the JSON file that this program writes."""
    versions = record["machine"]["versions"]
    products = [row["product"] for row in record["rows"].values() if row["product"]]
    rates = [f"{rate / 1e12:.0f}" for rate in sorted(products)] or ["-"]
    page = [
        "# Our training step on a GPU against PyTorch's",
        "",
        f"Written by `python -m benchmarks.accelerator`. {record['title']}. *ours / PyTorch* are medians over"
        " interleaved rounds, with the interval of the sign test (95 %). *PyTorch* is eager. *MFU* is the FLOPs of the"
        " matrix products of our step over the time and over the rate of a large bfloat16 product"
        f" ({rates[0]} to {rates[-1]} TFLOP/s here).",
        "",
        f"{record['device']}; {record['machine']['cores']} cores; JAX {versions['jax']}, PyTorch"
        f" {versions.get('torch', '-')}, transformers {versions.get('transformers', '-')}; commit"
        f" {record['machine']['commit']}.",
        "",
    ]
    columns = ("recipe", "tokens per step", *(f"{case} (ms)" for case in CASES))
    columns += ("ours / PyTorch", "ours / torch.compile", "MFU of ours", "MFU of PyTorch's best")
    columns += ("peak GPU memory of ours, PyTorch, torch.compile (GiB)",)
    rows = []
    for recipe, row in record["rows"].items():
        names = [f"{recipe}, {case}" for case in CASES]
        times = {n: record["cases"][n]["seconds"] for n in names if n in record["cases"]}
        medians = {name: median(seconds) for name, seconds in times.items()}
        ours, *peers = names
        best = min((medians[name] for name in peers if name in medians), default=None)
        rows.append(
            (
                f"{recipe}: {ROWS[recipe].model}",
                f"{row['batch']} x {row['length']} = {row['batch'] * row['length']:,}",
                *(f"{1e3 * medians[n] / row['steps']:.1f}" if n in medians else "-" for n in names),
                *(_ratio(times, ours, peer) for peer in peers),
                _mfu(row, medians.get(ours)),
                _mfu(row, best),
                ", ".join(f"{x / 2**30:.1f}" if x else "-" for x in row["peak_bytes"]),
            )
        )
    return "\n".join(page) + "\n" + table.markdown(columns, rows)


def _ratio(times: Mapping[str, Seconds], case: str, baseline: str) -> str:
    if not {case, baseline} <= times.keys():
        return "-"
    rounds = ratios(times, case, baseline)
    low, high = interval(rounds)
    return f"{median(rounds):.2f} ({low:.2f} to {high:.2f})"


def _mfu(row: Mapping, seconds: float | None) -> str:
    if not (seconds and row["flops"] and row["product"]):
        return "-"
    return f"{row['flops'] / seconds / row['product']:.0%}"


def main() -> None:
    parser = make_parser(__doc__, "accelerator", rounds=7, peers=True)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument(
        "--steps", type=int_arg("--steps"), default=10, help="training steps in a timed call"
    )
    parser.add_argument(
        "--batch_factor",
        type=float_arg("--batch_factor"),
        default=1.0,
        help="factor of all batch sizes, above 0",
    )
    parser.add_argument(
        "--product",
        type=int_arg("--product"),
        default=8192,
        help="number of rows, and of columns, of the large matrices",
    )
    options = parser.parse_args()
    check(options.batch_factor > 0, f"--batch_factor must be above 0, got {options.batch_factor}")
    if not options.without_torch:
        check_installed("torch", "transformers")
    # The child processes read these variables.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    batches = {r: max(round(options.batch_factor * row.batch), 1) for r, row in ROWS.items()}
    all_timings, all_rows, pairs, errors, device = {}, {}, {}, {}, ""
    for group in GROUPS:
        recipes = [recipe for recipe in group if recipe in options.rows]
        if not recipes:
            continue
        rows = {PRODUCT: {PRODUCT: partial(make_product, options.product)}}
        for recipe in recipes:
            cases = CASES[:1] if options.without_torch else CASES
            rows[recipe] = {
                f"{recipe}, {case}": partial(
                    make_case, recipe, case, batches[recipe], options.steps
                )
                for case in cases
            }
        timings, notes = measure(rows, options.rounds)
        errors |= {name: note["error"] for name, note in notes.items() if "error" in note}
        device = device or notes[PRODUCT].get("device", "")
        flops = notes[PRODUCT].get("flops")
        rate = flops / median(timings[PRODUCT]) if flops and PRODUCT in timings else None
        for recipe in recipes:
            names = [f"{recipe}, {case}" for case in CASES]
            all_rows[recipe] = {
                "batch": batches[recipe],
                "length": ROWS[recipe].length,
                "steps": options.steps,
                "flops": notes[names[0]].get("flops"),  # of a timed call
                "product": rate,  # FLOP/s of the large product
                "peak_bytes": [notes.get(name, {}).get("peak_bytes") for name in names],
            }
            ours, *peers = names
            pairs |= {(ours, x): None for x in peers if {ours, x} <= timings.keys()}
        timings[f"{PRODUCT}, {recipes[0]}"] = timings.pop(PRODUCT, None)
        all_timings |= {name: timing for name, timing in timings.items() if timing}
        title = f"{options.steps} training steps in a call, bfloat16, with the recipe's dropout"
        in_order = {recipe: all_rows[recipe] for recipe in ROWS if recipe in all_rows}
        further = {"device": device, "rows": in_order, "errors": errors}
        record = report(title, all_timings, pairs, options.out, further)
        options.out.with_suffix(".md").write_text(markdown(record))


if __name__ == "__main__":
    program.run(main)
