"""Counts the lines of the modules that a training run imports: python -m benchmarks.imported_lines

For each paper, a new process trains the tiny model for one step (explicit_opt: one epoch). Counts all lines, blank
lines and comments included, of the modules of this project that the process has imported.
"""

import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from pathlib import Path

from common.report.table import markdown

CONFIGS = {
    "gmlp_lm": "enwik8_gmlp",
    "reservoir": "wmt_ffn_res",
    "perception": "perception",
    "explicit_opt": "mnist_explicit",
}
"""{paper: configuration}."""

ROOT = Path(__file__).parent.parent

TRAIN = """
import sys, importlib
from pathlib import Path
sys.argv = sys.argv[1:]
importlib.import_module(sys.argv[0]).main()
files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
own = {file for file in files if file and Path(file).is_relative_to(Path.cwd()) and "site-packages" not in file}
print(sum(len(Path(file).read_text().splitlines()) for file in own))
"""


def imported_lines(paper: str, config: str) -> int:
    """Returns the number of lines in the modules of this project that a paper's training program imports."""
    with tempfile.TemporaryDirectory() as folder:
        options = [f"--config=configs/{config}.py:tiny", f"--workdir={folder}/run"]
        length = "epochs" if paper == "explicit_opt" else "steps"
        options += ["--config.wandb.mode=disabled", "--config.eval.steps=1"]
        options.append(f"--config.train.{length}=1")
        done = subprocess.run(
            [sys.executable, "-c", TRAIN, f"{paper}.train", *options],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    return int(done.stdout.splitlines()[-1])


def main() -> None:
    ArgumentParser(prog="benchmarks.imported_lines", description=__doc__).parse_args()
    rows = [(paper, imported_lines(paper, config)) for paper, config in CONFIGS.items()]
    common = sum(len(path.read_text().splitlines()) for path in (ROOT / "common").rglob("*.py"))
    print(markdown(("", "lines"), [*rows, ("common/ in all", common)]))


if __name__ == "__main__":
    main()
