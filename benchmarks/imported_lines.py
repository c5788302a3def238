"""Counts the lines of the modules that a training run imports: python -m benchmarks.imported_lines

For each paper, a new process trains the tiny configuration for one step (explicit_opt: one epoch). Counts the lines of
the modules of this project that the process has imported: all lines, and lines of code (without blank lines, comments
and docstrings). Also counts the lines of all Python files in `common/`.
"""

import ast
import io
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterable
from pathlib import Path

from common.config import parser_for
from common.errors import check
from common.report.table import markdown
from common.runtime import program

CONFIGS = {
    "gmlp_lm": "enwik8_gmlp",
    "reservoir": "wmt_ffn_res",
    "perception": "perception",
    "explicit_opt": "mnist_explicit",
}
"""{paper: name of a configuration file in configs/}."""

ROOT = Path(__file__).parent.parent

TRAIN = """
import sys, importlib
from pathlib import Path
sys.argv = sys.argv[1:]
importlib.import_module(sys.argv[0]).main()
files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
own = {file for file in files if file and Path(file).is_relative_to(Path.cwd()) and "site-packages" not in file}
print(*own, sep="\\n")
"""


def code_lines(text: str) -> int:
    """Returns the number of lines of Python code, without blank lines, comments and docstrings."""
    nothing = tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.DEDENT, tokenize.ENDMARKER
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {n for t in tokens if t.type not in nothing for n in range(t.start[0], t.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def counts(paths: Iterable[Path]) -> tuple[int, int]:
    """Returns (number of lines, number of lines of code) of Python files."""
    texts = [path.read_text() for path in paths]
    return sum(len(text.splitlines()) for text in texts), sum(map(code_lines, texts))


def imported(paper: str, config: str) -> list[Path]:
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
        )
    error = done.stderr.strip().rpartition("\n")[2]
    check(
        done.returncode == 0,
        f"training configs/{config}.py:tiny failed ({error}): correct this error and run the command again",
    )
    return [Path(line) for line in done.stdout.splitlines() if line.startswith(f"{ROOT}/")]


def main() -> None:
    parser_for("benchmarks.imported_lines", __doc__).parse_args()
    rows = [(paper, *counts(imported(paper, config))) for paper, config in CONFIGS.items()]
    rows.append(("common/ in all", *counts((ROOT / "common").rglob("*.py"))))
    print(markdown(("", "lines", "of code"), rows))


if __name__ == "__main__":
    program.run(main)
