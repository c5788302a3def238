"""Times steps and decoders against PyTorch and against their own matrix products: python -m benchmarks.step

A recipe is a training step, with its dropout, or a decoder. Each row of the table is a recipe in one dtype. In every
round our program of the recipe, PyTorch's program, and the matrix products of our program take turns. The products are
the `dot` instructions of our compiled program, without the prefill of the recipe "writing". Each product runs alone,
with the same shapes and dtypes and as often as in the program, on the same operands in every execution.

Each row is written after its last round. A new row replaces an earlier row with the same CPU, AMX, number of cores,
recipe, dtype and commit.
"""

import csv
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median

from common.report import table
from common.runtime import program

BOTH = ("float32", "bfloat16")
DROPOUT = 0.3  # dropout rate of the translation models

RECIPES = {
    "translation": ("8 and 2 layers of 512, 64 x 32 tokens, dropout 0.3", BOTH),
    "reservoirs": ("the same, 2 FFN reservoirs", BOTH[1:]),
    "gmlp": ("4 layers of 512, 4 x 768 bytes, dropout 0.1", BOTH),
    "gpt": ("4 layers of 512, 4 x 768 bytes, dropout 0.1", BOTH),
    "bert_full": ("6 layers of 384, 8 x 128 tokens, dropout 0.1", BOTH),
    "bert_lora": ("the same, adapters of rank 32 with dropout 0.05", BOTH),
    "qwen2_full": ("4 layers of 256, 8 x 128 tokens, no dropout", BOTH),
    "qwen2_lora": ("the same, adapters of rank 32 with dropout 0.05", BOTH),
    "greedy": ("32 translations of 32 tokens", BOTH[:1]),
    "beam": ("the same, 5 beams", BOTH[:1]),
    "writing": ("GPT, 256 bytes after 1 byte", BOTH[:1]),
}
"""{recipe: (description, dtypes)}."""

# {recipe: model in `benchmarks.peers.language_torch`}, and {recipe: kind of reservoir in `benchmarks.ours.iwslt`}.
PEERS = {"gmlp": "g-mlp-pytorch", "gpt": "gpt"}
RESERVOIRS = {"translation": "none", "reservoirs": "ffn"}
BEAMS = {"greedy": 1, "beam": 5}
BATCH = 4  # rows of a batch of the byte language models
WRITTEN = 256  # bytes that the recipe "writing" generates

MOST = {"PyTorch": 1.0, "products": 1.4}
"""Targets: {baseline: upper bound of (our time) / (the baseline's time)}."""

# (case, baseline) of each time ratio in the table.
PAIRS = (("ours", "PyTorch"), ("ours", "products"), ("products", "PyTorch"))
MACHINE = ("cpu", "amx", "cores", "jax", "torch")  # columns that distinguish machines


def make_ours(recipe: str, dtype: str) -> tuple[Callable[[], object], ...]:
    """Returns three functions: one runs our step or decoder, one its matrix products, and one returns their FLOPs."""
    from benchmarks.ours import run_products

    step = make_our_step(recipe, dtype)
    products = step.products()
    flops = sum(count * product.flops for product, count in products.items())
    return step, run_products(products), lambda: flops


def make_our_step(recipe: str, dtype: str, **options: object) -> Callable[..., object]:
    """Returns a function that runs our step or decoder. For a step, it takes the number of steps to run (default: 1).

    `options` replace the recipe's arguments, such as `batch`. Decoders have no options.
    """
    from benchmarks import ours

    match recipe.split("_"):
        case ["translation" | "reservoirs"]:
            config = ours.iwslt(RESERVOIRS[recipe], dtype=dtype, dropout=DROPOUT)
            return ours.translation_step(config, **options)
        case ["gmlp" | "gpt"]:
            return ours.language_step(recipe, dtype, **{"batch": BATCH} | options)
        case ["greedy" | "beam"]:
            return ours.make_generate(BEAMS[recipe])
        case ["writing"]:
            return ours.make_writer("gpt", 1, WRITTEN)
        case [family, finetune]:
            return ours.classifier_step(**_classifier(family, finetune, dtype) | options)


def make_peer(recipe: str, dtype: str, **options: object) -> Callable[[], object]:
    """Returns a function that runs PyTorch's step or decoder.

    Args:
      options: arguments that replace the recipe's arguments, such as `batch`; `device`; and `compiled` and `steps` of
        `benchmarks.peers.training.make_runner`. Decoders have no options.
    """
    match recipe.split("_"):
        case ["translation" | "reservoirs"]:
            from benchmarks.peers import translation_torch

            return translation_torch.make_step(recipe == "reservoirs", dtype, DROPOUT, **options)
        case ["gmlp" | "gpt"]:
            from benchmarks.peers import language_torch

            return language_torch.make_step(PEERS[recipe], dtype, **{"batch": BATCH} | options)
        case ["greedy" | "beam"]:
            from benchmarks.peers import marian

            return marian.make_generate(BEAMS[recipe])
        case ["writing"]:
            from benchmarks.peers import language_torch

            return language_torch.make_writer("hugging face gpt-2", 1, WRITTEN)
        case [family, finetune]:
            from benchmarks.peers import lora_torch

            return lora_torch.make_step(**_classifier(family, finetune, dtype) | options)


def _classifier(family: str, finetune: str, dtype: str) -> dict[str, object]:
    from benchmarks.lora import BATCH, CLASSES, LENGTH, SIZES

    kind = {"family": family, "sizes": SIZES[family], "finetune": finetune, "dtype": dtype}
    return kind | {"batch": BATCH, "length": LENGTH, "classes": CLASSES}


def measure(recipe: str, dtype: str, rounds: int, where: Mapping) -> dict[str, str]:
    """Returns the row of a recipe in one dtype, {column: cell}. `where` is the result of `harness.machine`."""
    from benchmarks.harness import compare, interval, isolated, ratios

    factories = {
        ("ours", "products", "flops"): partial(make_ours, recipe, dtype),
        "PyTorch": partial(make_peer, recipe, dtype),
    }
    with isolated(factories) as cases:
        flops = cases.pop("flops")()
        timings = compare(cases, rounds=rounds, warmup=1, settle=1)
    row = {
        "recipe": recipe,
        "dtype": dtype,
        "cpu": where["cpu"],
        "amx": "yes" if where["amx"] else "no",
        "cores": where["cores"],
        "jax": where["versions"]["jax"],
        "torch": where["versions"]["torch"],
        "commit": where["commit"],
        "date": where["date"][:10],
        "load": f"{where['load_average']:.1f}",
        "rounds": rounds,
        "gflop": f"{flops / 1e9:.3g}",
    }
    row |= {f"{name}_ms": f"{1e3 * median(seconds):.1f}" for name, seconds in timings.items()}
    for pair in PAIRS:
        rounds = ratios(timings, *pair)
        low, high = interval(rounds)
        for end, value in (("", median(rounds)), (" low", low), (" high", high)):
            row[f"{' / '.join(pair)}{end}"] = f"{value:.3f}"
    return {name: str(cell) for name, cell in row.items()}


def merge(old: Sequence[dict], new: Sequence[dict]) -> list[dict]:
    """Returns all rows, sorted. New rows replace old rows with the same CPU, AMX, cores, recipe, dtype and commit."""

    def key(row: dict) -> tuple:
        names = ("cpu", "amx", "cores", "recipe", "dtype", "commit")
        return tuple(row[name] for name in names)

    def order(row: dict) -> tuple:
        return list(RECIPES).index(row["recipe"]), BOTH.index(row["dtype"]), row["date"]

    return sorted(({key(row): row for row in (*old, *new)}).values(), key=order)


def verdict(row: dict) -> str:
    """Returns whether a row meets its targets: "met", "missed", "products only: met" or "products only: missed".

    "products only" means that the matrix products alone take longer than PyTorch's step. The target against PyTorch is
    then out of reach, and only the target against the products counts.
    """
    products, torch = (float(row[f"ours / {name}"]) for name in ("products", "PyTorch"))
    met = products <= MOST["products"]
    if float(row["products / PyTorch"]) > 1:
        return f"products only: {'met' if met else 'missed'}"
    return "met" if met and torch <= MOST["PyTorch"] else "missed"


def markdown(rows: Sequence[dict]) -> str:
    machines = list(dict.fromkeys(tuple(row[name] for name in MACHINE) for row in rows))
    lines = [
        "# Our step against PyTorch's and against its own matrix products",
        "",
        "Written by `python -m benchmarks.step`. *ours / PyTorch* and *ours / products* are medians over interleaved"
        " rounds, with the interval of the sign test (95 %). *Products* are the matrix products of our compiled step,"
        " each alone, at XLA's rate on the same machine in the same rounds. *Load* is"
        " the load average before the first row.",
        "",
        f"**Target:** ours / PyTorch at most {MOST['PyTorch']}, and ours / products at most {MOST['products']}. If the"
        " products alone take longer than PyTorch's step, XLA's rates rule out the first target, and only the second"
        " counts (*products only*).",
        "",
    ]
    for number, (cpu, amx, cores, jax, torch) in enumerate(machines, 1):
        units = "with AMX" if amx == "yes" else "without AMX"
        lines.append(
            f"- Machine {number}: {cores} cores of {cpu} {units}; JAX {jax}, PyTorch {torch}"
        )
    cells = []
    for row in rows:
        torch, products = (
            f"{row[n]} ({row[f'{n} low']} to {row[f'{n} high']})"
            for n in ("ours / PyTorch", "ours / products")
        )
        cells.append(
            {
                "recipe": f"{row['recipe']}: {RECIPES[row['recipe']][0]}",
                "dtype": row["dtype"],
                "machine": 1 + machines.index(tuple(row[name] for name in MACHINE)),
                "commit": row["commit"],
                "load": row["load"],
                "ours (ms)": row["ours_ms"],
                "PyTorch (ms)": row["PyTorch_ms"],
                "ours / PyTorch": torch,
                "products (ms)": row["products_ms"],
                "ours / products": products,
                "products / PyTorch": row["products / PyTorch"],
                "target": verdict(row),
            }
        )
    body = table.markdown(tuple(cells[0]), [tuple(line.values()) for line in cells])
    return "\n".join(lines) + f"\n\n{body}"


def main() -> None:
    from benchmarks.harness import check_installed, machine, make_parser

    parser = make_parser(__doc__, "step", rounds=6, types=True)
    parser.set_defaults(out="results/benchmarks/step.csv")
    parser.add_argument("--rows", nargs="+", default=list(RECIPES), choices=RECIPES)
    options = parser.parse_args()
    check_installed("torch", "transformers", "peft", "g_mlp_pytorch")
    path = options.out
    # Read the commit before the first row changes a tracked file, which would add "-dirty" to the commit.
    where = machine()
    for recipe in options.rows:
        for dtype in (x for x in RECIPES[recipe][1] if x in options.types):
            row = measure(recipe, dtype, options.rounds, where)
            old = list(csv.DictReader(path.open())) if path.exists() else []
            rows = merge(old, [row])
            table.write_csv(path, list(row), [[each[name] for name in row] for each in rows])
            path.with_suffix(".md").write_text(markdown(rows))
            print(
                f"{recipe} {dtype}: ours {row['ours_ms']} ms; ours / PyTorch {row['ours / PyTorch']}; ours / products"
                f" {row['ours / products']}; {verdict(row)}",
                flush=True,
            )


if __name__ == "__main__":
    program.run(main)
