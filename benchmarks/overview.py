"""Draws test scores of all papers against training FLOPs and trained parameters: python -m benchmarks.overview

Reads the runs that are kept in results/. Writes to results/ the figure overview.png, with a column for each paper, and
the figure's numbers, overview.csv and overview.md.
"""

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.config import parser_for
from common.errors import check
from common.metrics.kinds import MODES
from common.report.panels import COLOURS
from common.report.table import publish
from common.runtime import program

BETTER = {"max": "higher is better", "min": "lower is better"}

RESULTS = Path(__file__).parent.parent / "results"


class Panel(NamedTuple):
    """A column of the figure: the results of one paper.

    Attributes:
      title: paper and data.
      runs: folder of the runs in results/.
      metric: name of a test metric in the summaries.
      label: axis label of the metric.
      cases: {case: name in the legend}. The first case trains all parameters.
    """

    title: str
    runs: str
    metric: str
    label: str
    cases: dict[str, str]


PANELS = (
    Panel(
        "reservoir: Multi30k de-en, 6 encoder layers",
        "reservoir/laptop/runs",
        "bleu",
        "test BLEU",
        {
            "iwslt_6_transformer": "everything",
            "iwslt_4_transformer": "2 layers fewer",
            "iwslt_6_t_reservoir": "2 layers frozen",
            "iwslt_6_ffn_reservoir": "2 FFN layers frozen",
            "iwslt_6_cnn_reservoir": "2 CNN layers frozen",
            "iwslt_6_bigru_reservoir": "2 BiGRU layers frozen",
            "iwslt_6_layerdrop": "LayerDrop",
        },
    ),
    Panel(
        "gmlp_lm: WikiText-2, equal parameters",
        "gmlp_lm/laptop/runs",
        "bits_per_byte",
        "test bits per byte",
        {
            "wikitext2_gpt_fixed": "GPT",
            "wikitext2_gmlp_fixed": "gMLP",
            "wikitext2_gmlp_attn_fixed": "gMLP + attention",
        },
    ),
    Panel(
        "explicit_opt: MNIST, one layer",
        "explicit_opt/laptop/runs",
        "accuracy",
        "test accuracy, %",
        {
            "digits_1_cold": "from random weights",
            "digits_1_zero": "from zeros",
            "digits_1_warm": "from the formula",
            "digits_1_scaled": "from the scaled formula",
            "digits_1_explicit": "the formula alone",
        },
    ),
    Panel(
        "perception: Rotten Tomatoes, 8,000 texts, MiniLM",
        "perception/worth_8000_texts/runs",
        "weighted_f1",
        "test weighted F1, %",
        {
            "full": "everything, from random weights",
            "lora": "LoRA",
            "head": "head",
            "tf_idf": "counted words",
        },
    ),
)


class Measured(NamedTuple):
    """Results of a case: the test metric of each seed, mean training FLOPs, and number of trained parameters."""

    case: str
    values: list[float]
    flops: float
    trained: int


def measured(panel: Panel, results: Path = RESULTS) -> list[Measured]:
    """Returns the measurements of a panel's cases, in order. Leaves out runs without the test metric."""
    # {case: {text after the seed in the run's name, such as "_learning_rate=0.01", or None: summaries}}
    found: dict[str, dict[str, list[dict]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted((results / panel.runs).glob("*/summary.json")):
        summary = json.loads(path.read_text())
        case, values = re.fullmatch(r"(.+?)(?:_seed\d+(.*))?", path.parent.name).groups()
        if panel.metric in summary["test"]:
            found[case][values].append(summary)
    # If runs with several values of a tuned field were tested, take the value with the most seeds.
    summaries = {case: max(tuned.values(), key=len) for case, tuned in found.items()}
    return [
        Measured(
            case,
            [s["test"][panel.metric] for s in summaries[case]],
            float(np.mean([s["flops"] for s in summaries[case]])),
            summaries[case][0]["params"]["trainable"],
        )
        for case in panel.cases
        if case in summaries
    ]


def draw(panels: Sequence[tuple[Panel, list[Measured]]], path: Path) -> None:
    """Writes the figure, with a column for each panel.

    Each seed is a dot, or a star in the panel's first case. A bar marks the mean over the seeds of a case.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(panels), 7.5), layout="constrained")
    axes = figure.subplots(2, len(panels), squeeze=False)
    for column, (panel, cases) in enumerate(panels):
        for row, cost in enumerate(("flops", "trained")):
            plot = axes[row][column]
            for number, one in enumerate(cases):
                x, colour = getattr(one, cost), COLOURS[number]
                marker = "*" if one.case == next(iter(panel.cases)) else "o"
                seeds = f"{len(one.values)} seeds" if len(one.values) > 1 else "one run"
                dots = {
                    "color": colour,
                    "alpha": 0.6,
                    "label": f"{panel.cases[one.case]} ({seeds})",
                }
                plot.plot(x, np.mean(one.values), "_", color=colour, markersize=22)
                plot.plot(np.full(len(one.values), x), one.values, marker, **dots)
            plot.set_xlabel("training FLOPs" if cost == "flops" else "trained parameters")
            plot.set_ylabel(f"{panel.label} ({BETTER[MODES[panel.metric]]})")
            plot.grid(alpha=0.3)
            # Include 0 in the x-axis, so that a small difference looks small.
            most = max(getattr(one, cost) for one in cases)
            plot.set_xlim(-0.06 * most, 1.1 * most)
        axes[0][column].set_title(panel.title, fontsize=10)
        axes[1][column].legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = parser_for("benchmarks.overview", __doc__)
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="folder of the kept runs (default: results/)"
    )
    results = parser.parse_args().results
    panels = [(panel, cases) for panel in PANELS if (cases := measured(panel, results))]
    check(
        bool(panels),
        f"--results={results} has no runs with test metrics in its folders {', '.join(p.runs for p in PANELS)}: give"
        " the folder results/ of this repository",
    )
    rows = [
        (
            panel.title,
            panel.cases[one.case],
            panel.metric,
            len(one.values),
            float(np.mean(one.values)),
            float(np.std(one.values, ddof=1)) if len(one.values) > 1 else None,
            one.flops,
            one.trained,
        )
        for panel, cases in panels
        for one in cases
    ]
    columns = ("data", "way", "metric", "seeds", "mean", "deviation", "FLOPs", "trained parameters")
    publish(results / "overview", columns, rows)
    draw(panels, results / "overview.png")
    print(f"figure: {results / 'overview.png'}")


if __name__ == "__main__":
    program.run(main)
