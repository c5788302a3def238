"""Classifies lines of text with a trained run: python -m perception.classify --workdir=RUN < texts

Writes one line per text: class, probability, class, probability, ... in descending order of probability.
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from common.errors import UserError
from common.runtime import program


def batches(lines: Iterable[bytes], size: int) -> Iterator[list[str]]:
    """Yields batches of `size` lines. Yields all lines before an invalid line, then raises.

    Raises:
      UserError: a line is empty or not UTF-8.
    """
    batch: list[str] = []
    for number, line in enumerate(lines, start=1):
        fault = ""
        try:
            batch.append(line.decode("utf-8").rstrip("\r\n"))
            fault = "" if batch[-1].strip() else "is empty"
        except UnicodeDecodeError:
            fault = "is not UTF-8"
        if fault:
            yield batch[: (number - 1) % size]
            raise UserError(f"standard input: line {number} {fault}")
        if len(batch) == size:
            yield batch
            batch = []
    yield batch


def main() -> None:
    from common.config import parser_for, positive_int_arg

    parser = parser_for("perception.classify")
    parser.add_argument(
        "--workdir", required=True, type=Path, metavar="RUN", help="directory of the run"
    )
    parser.add_argument(
        "--pretrained",
        type=Path,
        metavar="DIR",
        help="pretrained weights (default: the directory that the run used)",
    )
    parser.add_argument(
        "--top",
        type=positive_int_arg("--top"),
        metavar="K",
        help="number of classes to print (default: all)",
    )
    parser.add_argument(
        "--batch", type=positive_int_arg("--batch"), default=64, metavar="N", help="batch size"
    )
    options = parser.parse_args()

    from perception.run import load

    trained = load(options.workdir, weights=options.pretrained)
    for lines in batches(sys.stdin.buffer, options.batch):
        for row in trained.probabilities(lines, options.batch) if lines else ():
            likeliest = (-row).argsort(kind="stable")[: options.top]
            cells = (f"{trained.classes[i]}\t{row[i]:.4f}" for i in likeliest)
            sys.stdout.write("\t".join(cells) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    program.run(main)
