"""Writes results/CLAIMS.md, the claims of all papers and their verdicts: python -m benchmarks.claims"""

from pathlib import Path

from common.config import check_choice, parser_for
from common.errors import check
from common.report.claims import NOTE
from common.runtime import program


def page(results: Path) -> str:
    """Returns the claims of all papers as Markdown, from the files RESULTS/PAPER/SCALE/claims.md.

    If about.md, which describes the runs, exists beside claims.md, its text stands above the claims.

    Raises:
      UserError: no claims.md exists, or the folder of a claims.md is not named after a scale.
    """
    scales = ("paper", "laptop", "tiny")
    files = list(results.glob("*/*/claims.md"))
    check(
        bool(files),
        f"{results} has no file PAPER/SCALE/claims.md: write it with python -m PAPER.reproduce claims --scale=SCALE"
        f" --out={results}/PAPER/SCALE",
    )
    for path in files:
        check_choice(f"{path}: name of its folder", path.parts[-2], scales)
    files.sort(key=lambda path: (path.parts[-3], scales.index(path.parts[-2])))
    parts = ["# Claims\n", f"{NOTE}\n"]
    for path in files:
        paper, scale = path.parts[-3:-1]
        out = path.parent.relative_to(results.parent)
        command = f"python -m {paper}.reproduce claims --scale={scale} --kept --out={out}"
        parts += [f"## {paper}, {scale}\n", f"`{command}`\n"]
        about = path.with_name("about.md")
        parts += [file.read_text(encoding="utf-8") for file in (about, path) if file.exists()]
    return "\n".join(parts)


def main() -> None:
    parser = parser_for("benchmarks.claims", __doc__)
    parser.add_argument("--results", type=Path, default=Path("results"), metavar="DIR")
    options = parser.parse_args()
    path = options.results / "CLAIMS.md"
    path.write_text(page(options.results), encoding="utf-8")
    print(f"written: {path}")


if __name__ == "__main__":
    program.run(main)
